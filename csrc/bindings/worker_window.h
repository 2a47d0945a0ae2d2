// Windows in a device's memory: their part of decode_worker._native.
#pragma once

#include <nanobind/nanobind.h>

void bind_window(nanobind::module_& m);
