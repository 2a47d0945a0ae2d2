// Softmax attention over records that lie anywhere in a window, one pass over memory per (slot, KV head).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/pack.h"

namespace headgate {

// What one KV head of one row attends to: up to three ranges of places, then a list of them.
struct AttendLane {
  struct Range {
    int32_t first, count;
  };
  static constexpr int kRanges = 3;

  const uint8_t* base = nullptr;  // of place 0
  Range ranges[kRanges] = {};
  const int32_t* places = nullptr;
  int32_t count = 0;  // of `places`

  size_t records() const {
    size_t total = count;
    for (const Range& range : ranges) total += range.count;
    return total;
  }
};

struct RecordKind {
  Dtype dtype;  // float32, bfloat16, int8 or int4
  size_t record_bytes;
};
inline constexpr int kRecordKindsMax = 2;

// std::invalid_argument for a dtype that `attend` does not read, and for vectors of d elements that do not fit.
RecordKind record_kind(int dtype, int d, size_t record_bytes);

struct AttendArgs {
  const float* query;       // [batch][heads * group][d]
  const AttendLane* lanes;  // [batch][heads][kind_count]: what a head attends to lies in the lanes of its kinds
  RecordKind kinds[kRecordKindsMax];
  int kind_count;
  int batch;
  int heads;  // KV heads
  int group;  // query heads per KV head
  int d;      // a multiple of 16
  float scale;
  int threads;
  float* out;  // [batch][heads * group][d]; zero for a head that holds no record
  float* lse;  // [batch][heads * group]: log of the sum of exp(score), -inf for a head that holds no record; or null
};

// The result does not depend on `threads`: lanes are cut into parts of a fixed length, and parts are joined in order.
void attend(const AttendArgs& args);

}  // namespace headgate
