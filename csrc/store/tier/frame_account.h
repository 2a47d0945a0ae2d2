// What one owner (uid) holds of the DRAM tier, and how much it may.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "store/tier/policy.h"

namespace headgate {

struct FramePart;

// Guarded by Frames. What is atomic is written under its mutex and may be read without; `in_portions`
// and `lacked` are the copy threads'.
struct FrameAccount {
  static constexpr uint32_t kNoLimit = UINT32_MAX;

  explicit FrameAccount(uint32_t owner) : owner(owner) {}

  // Frames that it may pin beside those that it has pinned, as far as its own bound goes.
  uint32_t pinnable() const {
    uint32_t most = limit.load(std::memory_order_relaxed);
    return most - std::min(most, pinned.load(std::memory_order_relaxed));
  }

  const uint32_t owner;
  std::atomic<uint32_t> used{0};              // frames that hold an extent of its packs
  Domain frames{Domain::kOwn};                // those
  std::atomic<uint32_t> pinned{0};            // frames of those; held ones are not counted
  std::atomic<uint32_t> limit{kNoLimit};      // frames
  FramePart* part = nullptr;                  // its arena: then its packs have frames there alone
  std::atomic<uint32_t> arena{0};             // frames of that; 0: it has none
  std::atomic<uint32_t> pulled{0};            // pins that wait for its workers to have read
  std::atomic<uint64_t> moved_bytes{0};       // into its workers' windows, or that they were told to read
  std::atomic<uint32_t> in_portions[2] = {};  // pinned for its runs, of all threads: decode's, bulk's
  std::atomic<uint32_t> lacked[2] = {};       // those of them that had to be read
};

}  // namespace headgate
