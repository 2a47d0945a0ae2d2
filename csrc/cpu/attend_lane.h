// What the attention kernels of all instruction sets share: the records of one lane as a sequence of blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/attend.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace headgate {

inline constexpr int kBlockRecords = 64;  // 32 KiB of 512 B records: the next block travels to the L2 cache meanwhile
inline constexpr int kCacheLine = 64;

// Query heads are taken in tiles of 4, 2 and 1: the next tile when `left` heads remain.
inline int tile_heads(int left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

// Bfloat16 in memory; the kernels widen it to float32.
struct Bf16 {
  uint16_t bits;
};
// Codes of a quantised vector (decode_worker/quantised.py).
struct Int8 {
  int8_t code;
};
struct Int4 {
  uint8_t pair;
};

template <class T>
inline constexpr bool kScaled = sizeof(T) == 1;  // a vector has a scale, in the low bits of its first codes
template <class T>
constexpr size_t bytes_of(size_t elements) {
  return std::is_same_v<T, Int4> ? elements / 2 : elements * sizeof(T);
}
inline constexpr float kInt4Zero = 7.5f;  // between two codes

// The bfloat16 that a quantised vector is multiplied by: the low bits of its first codes, of 4 bits first those in the
// low halves of bytes.
template <class T>
inline float scale_of(const uint8_t* vector) {
  uint32_t bits = 0;
#if defined(__x86_64__)
  __m128i codes;
  if constexpr (std::is_same_v<T, Int8>) {
    codes = _mm_slli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(vector)), 7);
  } else {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(vector));
    codes = _mm_unpacklo_epi64(_mm_slli_epi16(pairs, 7), _mm_slli_epi16(pairs, 3));
  }
  bits = uint32_t(_mm_movemask_epi8(codes)) << 16;
#else
  for (int i = 0; i < 16; ++i) {
    const int code = std::is_same_v<T, Int8> ? vector[i] : vector[i % 8] >> i / 8 * 4;
    bits |= uint32_t(code & 1) << (16 + i);
  }
#endif
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

struct Block {
  const uint8_t* record[kBlockRecords];  // padded with the last record, so that kernels may read whole tiles
  int count;
};

// Walks the records [from, to) of a lane: its ranges one after the other, then its place list.
class LaneCursor {
 public:
  LaneCursor(const AttendLane& lane, size_t record_bytes, size_t from, size_t to)
      : first_(lane.base),
        record_bytes_(record_bytes),
        range_(lane.ranges),
        range_end_(lane.ranges + AttendLane::kRanges),
        place_(lane.places),
        left_(to - from) {
    while (range_ != range_end_ && from >= size_t(range_->count)) from -= range_->count, ++range_;
    if (range_ == range_end_)
      place_ += from;
    else
      skip_ = static_cast<int>(from);
  }

  void fill(Block& block) {
    int want = static_cast<int>(std::min<size_t>(left_, kBlockRecords));
    int n = 0;
    while (n < want) {
      if (range_ == range_end_) {
        block.record[n++] = at(*place_++);
        continue;
      }
      int take = std::min(range_->count - skip_, want - n);
      for (int i = 0; i < take; ++i) block.record[n++] = at(range_->first + skip_ + i);
      skip_ += take;
      if (skip_ == range_->count) ++range_, skip_ = 0;
    }
    for (int i = n; n > 0 && i < kBlockRecords; ++i) block.record[i] = block.record[n - 1];
    block.count = n;
    left_ -= n;
  }

 private:
  const uint8_t* at(int32_t place) const { return first_ + size_t(place) * record_bytes_; }

  const uint8_t* first_;
  size_t record_bytes_;
  const AttendLane::Range* range_;
  const AttendLane::Range* range_end_;
  const int32_t* place_;
  size_t left_;
  int skip_ = 0;
};

// The unnormalised result over some records of a lane, in the kernel's element order; logarithms are base 2.
struct Partial {
  float* acc;  // [group][d]
  float* top;  // [group], the largest score
  float* sum;  // [group], of 2 ^ (score - top)
};

// query: [group][d] of the lane as `arrange` (attend.cc) lays it out for the kernel's width and the lane's kind.
using AttendPart = void (*)(const AttendArgs&, const AttendLane& lane, size_t record_bytes, size_t from, size_t to,
                            const float* query, Partial out);

struct AttendKernel {
  int width;  // floats per vector; d must be a multiple of 2 * width
  AttendPart float32;
  AttendPart bfloat16;
  AttendPart int8;
  AttendPart int4;
};

}  // namespace headgate
