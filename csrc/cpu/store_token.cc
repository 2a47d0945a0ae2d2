#include "cpu/store_token.h"

#include <cstring>
#include <utility>

#include "cpu/attend_lane.h"
#include "cpu/level.h"

namespace headgate {
namespace {

// Round to nearest even, as torch does; a NaN stays one.
uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define HEADGATE_KERNEL "cpu/store_token_kernel.inc"
#include "cpu/each_level.inc"

}  // namespace

void store_token(uint8_t* record, const float* key, const float* value, size_t d, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(record, key, d * sizeof(float));
    std::memcpy(record + d * sizeof(float), value, d * sizeof(float));
    return;
  }
  const auto& round = kernel_of(level());
  auto* to = reinterpret_cast<uint16_t*>(record);
  round(key, d, to);
  round(value, d, to + d);
}

}  // namespace headgate
