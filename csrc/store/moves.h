// When a copy thread may leave the core that it shares with the worker that it has just answered.
#pragma once

#include <algorithm>
#include <cstdint>

namespace headgate {

// Where it comes back, because the other core is no better, each move makes the pause before the next one longer.
// Decisions only: no clock.
class Moves {
 public:
  static constexpr uint64_t kPauseMinNs = 200'000;
  static constexpr uint64_t kPauseMaxNs = 100'000'000;

  // Whether to move at `now`, from which the next pause counts. A thread that was out of the way for as long again as
  // the pause took had moved to the right core.
  bool move(uint64_t now) {
    if (now < next_ns_) return false;
    const bool held = now >= next_ns_ + pause_ns_;
    pause_ns_ = held ? kPauseMinNs : std::min(2 * pause_ns_, kPauseMaxNs);
    next_ns_ = now + pause_ns_;
    return true;
  }

 private:
  uint64_t next_ns_ = 0, pause_ns_ = 0;
};

}  // namespace headgate
