// Which frame to give up: a second-chance clock whose hand also wears down the weight that warm-up gave a frame.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace headgate {

// Decisions only: no memory, no I/O, no clock of its own. Not thread-safe.
class ClockPolicy {
 public:
  explicit ClockPolicy(uint32_t frames) : state_(frames) {}

  void admit(uint32_t frame, uint8_t weight) { state_[frame] = {true, false, weight}; }
  void use(uint32_t frame) { state_[frame].used = true; }
  void weigh(uint32_t frame, uint8_t weight) {
    if (state_[frame].weight < weight) state_[frame].weight = weight;
  }
  void remove(uint32_t frame) { state_[frame] = {}; }

  // For a read that a run waits for: passes over used frames once and over weighted ones `weight` times. After
  // `looks`, which a large tier reaches when everything was just used, the frame last passed over has to go.
  // `next()` moves a hand over `frames` frames in turn and returns where it was.
  template <typename Next, typename Evictable>
  std::optional<uint32_t> victim(uint32_t frames, Next next, Evictable evictable, uint64_t looks = kLooksMax) {
    uint64_t steps = uint64_t{frames} * (kWeightMax + 2);
    std::optional<uint32_t> passed;
    for (uint64_t step = 0; step < steps && (step < looks || !passed); ++step) {
      uint32_t frame = next();
      State& s = state_[frame];
      if (!s.admitted || !evictable(frame)) continue;
      passed = frame;
      if (s.used) {
        s.used = false;
      } else if (s.weight > 0) {
        --s.weight;
      } else {
        return frame;
      }
    }
    return passed;
  }

  // For a read ahead: only a frame that is colder than everything with a use or a weight, and nothing wears down.
  template <typename Next, typename Evictable>
  std::optional<uint32_t> coldest(uint32_t frames, Next next, Evictable evictable) {
    for (uint32_t step = 0; step < kLookAhead && step < frames; ++step) {
      uint32_t frame = next();
      const State& s = state_[frame];
      if (s.admitted && !s.used && s.weight == 0 && evictable(frame)) return frame;
    }
    return std::nullopt;
  }
  static constexpr uint8_t kWeightMax = 7;

 private:
  struct State {
    bool admitted = false;
    bool used = false;
    uint8_t weight = 0;
  };
  static constexpr uint32_t kLookAhead = 256;
  static constexpr uint64_t kLooksMax = 1024;

  std::vector<State> state_;
};

}  // namespace headgate
