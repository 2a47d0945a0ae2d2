// CRC-32C (Castagnoli), in hardware where the processor has SSE4.2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headgate {

// Continues `crc` (0 to begin) over `bytes` bytes.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The same without special instructions.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace headgate
