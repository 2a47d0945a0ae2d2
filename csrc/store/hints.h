// Hints (PROMOTE): which records a worker is likely to want, looked through a portion at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/ring_work.h"
#include "store/tier/read_ahead.h"

namespace headgate {

// Used by one copy thread.
class Hints {
 public:
  Hints(const Frames& frames, ReadAhead& ahead, Counters& counters);

  // Looks through the next pairs of the ring's oldest hint: their extents are read ahead. Nothing is answered, and a
  // wrong or late hint is only counted. Returns what it cost, as bytes copied.
  uint64_t step(RingWork& ring, TakenTicket& ticket);

 private:
  bool begin(RingWork& ring, TakenTicket& ticket);
  void read_ahead(RingWork& ring, const TakenTicket& ticket, std::span<const Pair> pairs);

  const Frames& frames_;
  ReadAhead& ahead_;
  Counters& counters_;
  std::vector<Pair> pairs_;
};

}  // namespace headgate
