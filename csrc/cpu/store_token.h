// Writes one new token's key and value as a record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/pack.h"

namespace headgate {

// Round to nearest even, as torch does; a NaN stays one.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// record = key[d] || value[d] in the storage dtype.
inline void store_token(uint8_t* record, const float* key, const float* value, size_t d, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(record, key, d * sizeof(float));
    std::memcpy(record + d * sizeof(float), value, d * sizeof(float));
    return;
  }
  auto* out = reinterpret_cast<uint16_t*>(record);
  for (size_t i = 0; i < d; ++i) out[i] = to_bfloat16(key[i]), out[d + i] = to_bfloat16(value[i]);
}

}  // namespace headgate
