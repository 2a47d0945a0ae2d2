// The ring producer's part of decode_worker._native.
#pragma once

#include <nanobind/nanobind.h>

void bind_ring(nanobind::module_& m);
