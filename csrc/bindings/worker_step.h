#pragma once

#include <nanobind/nanobind.h>

void bind_step(nanobind::module_& m);
