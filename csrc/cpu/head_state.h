// What a worker knows of every (layer, slot, KV head), in arrays that somebody else owns
// (decode_worker/kernels/state.py says what each holds). A head's set has two sides: `current` is attended to, `next`
// becomes it by one flip.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headgate {

enum class QueryKind : int8_t { kNone = 0, kSpeculative = 1, kTrue = 2 };

struct HeadState {
  struct Shape {
    int layers, slots, heads;
    int group, d;  // query heads per KV head, head dimension
    int places;    // the longest list of attended places
    int units;     // the most units that a head's window can hold
    int unit;      // records per unit of selection, caching and transfer
    int sink, recent, tail;
  } shape;

  // [2][layers][slots][heads] (...): the two sides
  int32_t* held;         // [units] ids of the units that the window holds, ascending
  int32_t* held_places;  // [units] where each lies: the first of its `unit` places
  int32_t* held_count;
  int32_t* places;  // [places] of the records that are attended to, in order of their ids
  int32_t* count;
  float* label;  // [group][d]
  int8_t* label_kind;
  int32_t* cover;
  int32_t* generation;

  // [layers][slots][heads] (...)
  uint8_t* parity;          // which side is the current one
  int32_t* issued;          // the latest generation that was asked for
  int32_t* stamp;           // [units] of each unit place: how recently, or often, its unit was selected
  const int64_t* base;      // byte offset of place 0 in the window
  const int64_t* own;       // of what the worker writes: a tail, or the lane of a resident head
  const int32_t* selected;  // k: units that a selection takes
  const int32_t* capacity;  // units that the window has places for
  int64_t* chosen;          // units that selections took since the state was made
  int64_t* missing;         // of those, what had to be fetched

  // [layers][heads]
  const float* tau;
  const float* weights;  // [group]
  const uint8_t* resident;
  const int32_t* forced_from;  // at this distance of position and cover a head misses, if its cover can move

  // [slots]
  const int32_t* stored;          // N
  const int32_t* first_position;  // the first step's, which is in no ratio
  const int64_t* epoch;
  int32_t* fault;  // of the present step: enum class StepFault, or a Fault of the store

  int64_t* counters;  // [Counter::kCount]

  struct Side {
    int32_t* held;
    int32_t* held_places;
    int32_t& held_count;
    int32_t* places;
    int32_t& count;
    float* label;
    int8_t& label_kind;
    int32_t& cover;
    int32_t& generation;
  };

  size_t index(int layer, int slot, int head) const {
    return (size_t(layer) * shape.slots + slot) * shape.heads + head;
  }

  Side side(int layer, int slot, int head, int which) const {
    const size_t i = size_t(which) * shape.layers * shape.slots * shape.heads + index(layer, slot, head);
    return {held + i * shape.units,
            held_places + i * shape.units,
            held_count[i],
            places + i * shape.places,
            count[i],
            label + i * shape.group * shape.d,
            label_kind[i],
            cover[i],
            generation[i]};
  }
  Side current(int layer, int slot, int head) const {
    return side(layer, slot, head, parity[index(layer, slot, head)]);
  }
  Side next(int layer, int slot, int head) const {
    return side(layer, slot, head, 1 - parity[index(layer, slot, head)]);
  }

  bool is_resident(int layer, int head) const { return resident[layer * shape.heads + head]; }

  // S of docs/qsac.md: tokens below it may be selected at `position`.
  int32_t limit(int slot, int32_t position) const {
    const int32_t n = stored[slot], sinks = shape.sink < n ? shape.sink : n;
    const int32_t old = position - shape.recent < n ? position - shape.recent : n;
    return sinks > old ? sinks : old;
  }

  // Sets, labels and covers change together, or not at all.
  void commit(int layer, int slot, int head) { parity[index(layer, slot, head)] ^= 1; }
};

// Why a row has no logits. Positive numbers are the store's (enum class Fault).
enum class StepFault : int32_t { kNone = 0, kTailFull = -1, kNotPosted = -2 };

// decode_worker/policy/counters.py names them.
enum class Counter : int {
  kSteps,
  kLookups,
  kHits,
  kForced,
  kMoved,
  kStale,
  kCleared,
  kErrors,
  kHinted,
  kHintsDropped,
  kCount
};

}  // namespace headgate
