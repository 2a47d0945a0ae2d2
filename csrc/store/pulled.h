// Frames that a worker was told to read itself: each stays pinned until the worker says that it has.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "store/tier/frames.h"

namespace headgate {

// Of one ring; used by its copy thread only.
class Pulled {
 public:
  explicit Pulled(FrameAccount& owner) : owner_(owner) {}

  bool empty() const { return tickets_.empty(); }
  // Takes over a pin for a ticket. False: its owner has as many as it may, or there is no memory.
  bool keep(uint64_t seq, uint32_t frame) noexcept;
  // The worker has all cells of the ticket: from here on it may take its time.
  void answered(uint64_t seq, uint64_t now_ns);
  // Whether the worker has not read the oldest ticket for so long.
  bool late(uint64_t now_ns, uint64_t patience_ns) const;
  // Unpins what tickets <= `seq` have, `frames_max` of them at once; true when there was any.
  bool release(uint64_t seq, size_t frames_max, Frames& frames);

 private:
  struct Ticket {
    std::vector<uint32_t> frames;
    uint64_t answered_ns = 0;  // 0: not yet
  };

  FrameAccount& owner_;
  std::map<uint64_t, Ticket> tickets_;  // with at least one frame
};

}  // namespace headgate
