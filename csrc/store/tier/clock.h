// A second-chance clock, whose hand passes over used frames once.
#pragma once

#include "store/tier/queues.h"

namespace headgate {

class Clock final : public Queues {
 public:
  using Queues::Queues;

  void use(std::span<const uint32_t> frames) override {
    for (uint32_t frame : frames) frames_[frame].uses = 1;
  }
  std::optional<uint32_t> victim(Domain& domain, const Evictable& evictable, uint64_t looks) override {
    return sweep(domain, evictable, looks,
                 [this](uint32_t frame) { return frames_[frame].uses > 0 ? frames_[frame].uses-- > 0 : wear(frame); });
  }
  std::optional<uint32_t> coldest(Domain& domain, const Evictable& evictable, uint8_t weight) override {
    return cold(domain.lists[0], domain.side, evictable, weight);
  }
};

}  // namespace headgate
