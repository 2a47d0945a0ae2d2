// What a PROBE stores into a window (core/ring.h), so that a worker can tell whether its kernels see what the daemon
// delivers: lines that say who asked for them, and where they belong.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace headgate {

inline constexpr uint32_t kProbeBytes = 64;  // a line
inline constexpr uint32_t kProbeWords = kProbeBytes / sizeof(uint32_t);
inline constexpr uint32_t kProbeLinesMax = 1024;  // of a run

// Word `n` of a window, counted from its first byte.
HEADGATE_HD constexpr uint32_t probe_word(uint32_t seed, uint32_t n) {
  uint32_t x = n * 0x9e3779b1u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  return seed ^ x ^ x >> 13;
}

HEADGATE_HD inline void probe_line(uint32_t seed, uint64_t line, uint32_t* to) {
  for (uint32_t i = 0; i < kProbeWords; ++i) to[i] = probe_word(seed, uint32_t(line * kProbeWords + i));
}

}  // namespace headgate
