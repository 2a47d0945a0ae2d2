#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/attend_lane.h"
#include "cpu/level.h"
#include "cpu/query.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function that is not inlined

namespace headgate {
namespace {

using Encode = void (*)(const float*, const float*, const float*, size_t, int, uint64_t*);

namespace baseline {
#define HEADGATE_TARGET
constexpr int kWidth = 4;
#include "cpu/hash_encode_kernel.inc"
#undef HEADGATE_TARGET
}  // namespace baseline

#if defined(__x86_64__)
namespace avx2 {
#define HEADGATE_TARGET __attribute__((target("avx2,fma")))
constexpr int kWidth = 8;
#include "cpu/hash_encode_kernel.inc"
#undef HEADGATE_TARGET
}  // namespace avx2

namespace avx512 {
#define HEADGATE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
constexpr int kWidth = 16;
#include "cpu/hash_encode_kernel.inc"
#undef HEADGATE_TARGET
}  // namespace avx512
#endif

Encode kernel() {
#if defined(__x86_64__)
  if (level() == Level::kAvx512) return avx512::encode;
  if (level() == Level::kAvx2) return avx2::encode;
#endif
  return baseline::encode;
}

}  // namespace

void hash_encode(const float* x, const float* projection, const float* centre, size_t n, int d, uint64_t* codes) {
  kernel()(x, projection, centre, n, d, codes);
}

}  // namespace headgate
