// docs/qsac.md steps 3 to 5 for all heads of a layer: which of them miss, what they select, and what must travel.
#pragma once

#include <cstdint>
#include <vector>

#include "core/ring.h"
#include "cpu/head_state.h"
#include "cpu/record_maps.h"
#include "cpu/selector.h"

namespace headgate {

// decode_worker/policy/cache/base.py: what stays in a head's window beside the set that is attended to.
struct CacheRule {
  enum class Stamp : int { kNone, kStep, kCount };

  bool keeps;    // units stay until their place is wanted; otherwise what no set names is forgotten
  bool whole;    // a miss fetches its whole set, whatever the window holds
  Stamp on_use;  // what a selection does to the stamp of a unit that is held; the lowest stamp goes first
};

struct LookUpRules {
  CacheRule cache;
  bool reuses;  // a head whose query is similar to its label keeps its set
  float cos_floor;
  int threads;
};

// The rows of a step: row i processes `position[i]` of slot[i]; a slot of -1 takes no part.
struct Rows {
  int count;
  const int32_t* slot;
  const int32_t* position;
  int32_t step;
};

// One head's change, waiting for its records.
struct Wish {
  int row, slot, head;
  bool has_old_set;  // false: without these records the head has nothing coherent to attend to
  bool cleared;
  int64_t chosen;   // units
  int64_t missing;  // of those, what has to be fetched
  int64_t pairs;    // records of that, and sinks
};

// A layer's ticket: run i is wish i's.
struct Outbox {
  std::vector<Run> runs;
  std::vector<Pair> pairs;  // of each run by record
  std::vector<Wish> wishes;
};

class LookUp {
 public:
  LookUp(HeadState& state, const RecordMaps& maps, Selector& selector, LookUpRules rules)
      : state_(state), maps_(maps), selector_(selector), rules_(rules) {}

  // query: [rows][heads * group][d]. What needs no records is committed at once; the rest becomes `out`'s ticket.
  void plan(int layer, const Rows& rows, const float* query, QueryKind kind, Outbox& out);

 private:
  bool misses(int layer, int slot, int head, int32_t position, const float* query, QueryKind kind);
  void choose(int layer, const Rows& rows, const float* query, QueryKind kind, int threads, Wish& wish,
              std::vector<Pair>& pairs);

  HeadState& state_;
  const RecordMaps& maps_;
  Selector& selector_;
  LookUpRules rules_;
  std::vector<Wish> wishes_;
  std::vector<std::vector<Pair>> pairs_;  // of each wish
};

}  // namespace headgate
