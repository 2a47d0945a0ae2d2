// What policies share that keep frames in lists: links, uses and weights, and the sweep over a list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "store/tier/policy.h"

namespace headgate {

class Queues : public Policy {
 public:
  explicit Queues(uint32_t frames) : frames_(frames), links_{Links(frames), Links(frames)} {}

  void admit(uint32_t frame, uint64_t, uint8_t weight, Domain& own, Domain* common) override {
    frames_[frame] = {0, weight};
    own.lists[0].push(links_[Domain::kOwn], frame);
    if (common) common->lists[0].push(links_[Domain::kCommon], frame);
  }
  void weigh(uint32_t frame, uint8_t weight) override {
    frames_[frame].weight = std::max(frames_[frame].weight, weight);
  }
  void remove(uint32_t frame) override {
    for (Links& links : links_)
      if (FrameList* list = links[frame].list) list->remove(links, frame);
  }

 protected:
  using Links = std::vector<FrameLink>;
  struct Frame {
    uint8_t uses = 0;  // as the policy counts them
    uint8_t weight = 0;
  };
  static constexpr uint32_t kLookAhead = 256;  // frames that a read ahead looks at

  // Frame by frame from the first, which goes behind all others. `passed_over(frame)`: it stays, and is worn down.
  template <typename PassedOver>
  std::optional<uint32_t> sweep(Domain& domain, const Evictable& evictable, uint64_t looks, PassedOver passed_over) {
    FrameList& list = domain.lists[0];
    const uint64_t steps = uint64_t{list.size()} * (kWeightMax + 2);
    std::optional<uint32_t> passed;
    for (uint64_t step = 0; step < steps && step < (passed ? looks : kLooksMax); ++step) {
      const uint32_t frame = list.turn(links_[domain.side]);
      if (!evictable(frame)) continue;
      passed = frame;
      if (!passed_over(frame)) break;
    }
    return passed;
  }

  // The same where nobody waits, a few frames, and none is worn down: the first one that is unused.
  template <typename Unused>
  std::optional<uint32_t> cold(FrameList& list, Domain::Side side, const Evictable& evictable, Unused unused) {
    for (uint32_t look = std::min(list.size(), kLookAhead); look > 0; --look) {
      const uint32_t frame = list.turn(links_[side]);
      if (unused(frame) && evictable(frame)) return frame;
    }
    return std::nullopt;
  }
  std::optional<uint32_t> cold(FrameList& list, Domain::Side side, const Evictable& evictable, uint8_t weight) {
    return cold(list, side, evictable,
                [&](uint32_t frame) { return frames_[frame].uses == 0 && frames_[frame].weight < weight; });
  }

  // Neighbouring extents differ in few bits.
  static uint64_t mixed(uint64_t key) {
    key = (key ^ key >> 32) * 0x9e3779b97f4a7c15;
    return key ^ key >> 29;
  }

  bool wear(uint32_t frame) { return frames_[frame].weight > 0 && frames_[frame].weight-- > 0; }

  std::vector<Frame> frames_;
  Links links_[2];  // by side
};

}  // namespace headgate
