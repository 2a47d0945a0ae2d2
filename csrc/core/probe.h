// What the daemon stores into the first and the last line of a window in a device's memory before it hands it over, so
// that the worker can tell whether what is stored at one end is seen at the other.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace headgate {

inline constexpr uint32_t kProbeBytes = 64;
HEADGATE_HD constexpr uint8_t probe_byte(uint32_t i) { return uint8_t(0xA5 ^ (i * 29)); }
// Byte of the last line of a window of `bytes` bytes.
HEADGATE_HD constexpr uint64_t last_probe(uint64_t bytes) { return (bytes / kProbeBytes - 1) * kProbeBytes; }

}  // namespace headgate
