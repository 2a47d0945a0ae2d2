// An index over a session's packs, as a miss asks it.
#pragma once

#include <cstdint>
#include <vector>

namespace headgate {

struct Selection {
  int32_t low, high;  // tokens [low, high) only
  int32_t k;          // units
  int unit;           // records per unit
};

class Selector {
 public:
  virtual ~Selector() = default;

  // The ids of the best k units for query [group][d] of one head, ascending; fewer if there are fewer. Called by
  // several threads at a time, for different heads, if `parallel`; each then brings one thread.
  virtual void select(int layer, int slot, int head, const float* query, const Selection& wanted, int threads,
                      std::vector<int32_t>& out) = 0;
  virtual bool parallel() const = 0;
};

}  // namespace headgate
