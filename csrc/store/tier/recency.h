// The order of time: by admission (fifo), or by the latest use (lru).
#pragma once

#include "store/tier/queues.h"

namespace headgate {

class Fifo : public Queues {
 public:
  explicit Fifo(uint32_t frames) : Queues(frames), used_(frames) {}

  void admit(uint32_t frame, uint64_t key, uint8_t weight, Domain& own, Domain* common) override {
    Queues::admit(frame, key, weight, own, common);
    used_[frame] = uses_;
  }
  void use(std::span<const uint32_t> frames) override {
    for (uint32_t frame : frames) used_[frame] = ++uses_;
  }
  std::optional<uint32_t> victim(Domain& domain, const Evictable& evictable, uint64_t looks) override {
    return sweep(domain, evictable, looks, [this](uint32_t frame) { return wear(frame); });
  }
  // Cold is what has not been used for as many uses as touch all others twice.
  std::optional<uint32_t> coldest(Domain& domain, const Evictable& evictable, uint8_t weight) override {
    const FrameList& list = domain.lists[0];
    uint32_t frame = list.first();
    for (uint32_t look = std::min(list.size(), kLookAhead); look > 0; --look) {
      const bool cold = uses_ - used_[frame] > 2 * uint64_t{list.size()};
      if (cold && frames_[frame].weight < weight && evictable(frame)) return frame;
      frame = links_[domain.side][frame].after;
    }
    return std::nullopt;
  }

 private:
  uint64_t uses_ = 0;
  std::vector<uint64_t> used_;  // by frame: uses_ as its last use found it
};

class Lru final : public Fifo {
 public:
  using Fifo::Fifo;

  void use(std::span<const uint32_t> frames) override {
    Fifo::use(frames);
    for (uint32_t frame : frames) {
      for (Links& links : links_) {
        FrameList* list = links[frame].list;
        if (!list) continue;
        list->remove(links, frame);
        list->push(links, frame);
      }
    }
  }
};

}  // namespace headgate
