// The products' part of decode_worker._native.
#pragma once

#include <nanobind/nanobind.h>

void bind_products(nanobind::module_& m);
