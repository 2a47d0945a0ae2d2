// What an answer by offsets looks like: the window's memory of a worker that reads the daemon's frames itself.
//
//   landing   `bytes` bytes, as a window that the daemon copies to
//   lines     u32 for each 64 bytes of the landing; that of a place's first 64 bytes says where its record lies:
//             0 in the landing, n from line n - 1 of the arena on
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace headgate {

inline constexpr uint32_t kPullLineBytes = 64;

struct PullLayout {
  uint64_t bytes;  // of the landing

  HEADGATE_HD constexpr uint64_t lines_off() const { return page(bytes); }
  HEADGATE_HD constexpr uint64_t lines() const { return (bytes + kPullLineBytes - 1) / kPullLineBytes; }
  // UINT64_MAX, which nobody has, where it would not fit into 64 bits.
  HEADGATE_HD constexpr uint64_t memory_bytes() const {
    return bytes > kBytesMax ? UINT64_MAX : page(lines_off() + lines() * sizeof(uint32_t));
  }

 private:
  static constexpr uint64_t kBytesMax = UINT64_MAX / 2;

  HEADGATE_HD static constexpr uint64_t page(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }
};

}  // namespace headgate
