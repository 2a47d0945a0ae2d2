// Which records heads will select that still have a set: what a worker hints to the daemon (PROMOTE), so that a miss
// finds them in DRAM. Changes nothing that a step computes.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/look_up.h"

namespace headgate {

struct LookAheadRules {
  int steps;            // within which a head is expected to miss; 0: now
  int64_t records_max;  // that a step hints
  bool reuses;          // otherwise every look-up misses
  bool whole;           // a miss fetches its whole set
  float cos_floor;
  int threads;
};

class LookAhead {
 public:
  LookAhead(const HeadState& state, Selector& selector, LookAheadRules rules)
      : state_(state),
        selector_(selector),
        rules_(rules),
        marks_(size_t(state.shape.layers) * state.shape.slots * state.shape.heads) {}

  // A step's budget begins anew.
  void begin() { left_ = rules_.records_max; }

  // Of heads that will miss before long with a query like this one, [rows][heads * group][d]: the records that their
  // windows lack. Since its label was made a head's similarity has fallen from 1 to what it is; it goes on so.
  void plan(int layer, const Rows& rows, const float* query, Outbox& out);

 private:
  struct Mark {
    int32_t generation = 0;  // the latest that was asked for
    int32_t asked = 0;       // at this position
    int32_t hinted = -1;     // at this position, of this generation
  };
  bool expects_miss(int layer, int slot, int head, int32_t position, const float* query);

  const HeadState& state_;
  Selector& selector_;
  LookAheadRules rules_;
  int64_t left_ = 0;         // records
  std::vector<Mark> marks_;  // [layers][slots][heads]
  std::vector<int32_t> wanted_;
};

}  // namespace headgate
