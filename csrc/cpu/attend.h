// Softmax attention over records that lie anywhere in a window, one pass over memory per (slot, KV head).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/pack.h"

namespace headgate {

struct AttendArgs {
  const float* query;     // [batch][heads * group][d]
  const uint8_t* window;  // places are counted from each lane's base
  const uint64_t* base;   // [batch][heads], bytes
  const int32_t* ranges;  // [batch][heads][range_count][2], (first place, count)
  const int32_t* places;  // [batch][heads][place_stride]
  const int32_t* counts;  // [batch][heads], how many of `places` count
  int batch;
  int heads;  // KV heads
  int group;  // query heads per KV head
  int d;      // a multiple of 16
  int range_count;
  int place_stride;
  Dtype dtype;  // float32 or bfloat16
  size_t record_bytes;
  float scale;
  int threads;
  float* out;  // [batch][heads * group][d]; zero for a head that holds no record
};

void attend(const AttendArgs& args);

}  // namespace headgate
