#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/attend_lane.h"
#include "cpu/level.h"
#include "cpu/query.h"

namespace headgate {
namespace {

#define HEADGATE_KERNEL "cpu/hash_encode_kernel.inc"
#include "cpu/each_level.inc"

}  // namespace

void hash_encode(const float* x, const float* projection, const float* centre, size_t n, int d, uint64_t* codes) {
  kernel_of(level())(x, projection, centre, n, d, codes);
}

}  // namespace headgate
