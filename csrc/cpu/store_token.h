// Writes one new token's key and value as a record.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/pack.h"

namespace headgate {

// record = key[d] || value[d] in the storage dtype, float32 or bfloat16.
void store_token(uint8_t* record, const float* key, const float* value, size_t d, Dtype dtype);

}  // namespace headgate
