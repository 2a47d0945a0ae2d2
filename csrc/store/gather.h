// Copies many small records from scattered places; the memory-bound inner loop of the daemon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headgate {

inline constexpr uint32_t kLineBytes = 64;

// Asks memory for a record that will be copied. Into the first cache: the way from there to a store is the shortest.
inline void prefetch_record(const uint8_t* record, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(record + at, 0, 3);
}

// Memory takes about as long to answer as the copy of this much takes: a quarter of a first cache.
inline constexpr uint32_t kAskedBytes = 8 << 10;

// Copies `count` records of `bytes` bytes (a multiple of 64) from from[i] to base + to[i], places of one window lane.
// Each is asked for kAskedBytes before it is copied; the first ones are the caller's to ask for. past_caches: with
// stores that bypass the caches, for more than a cache holds; they need a fence.
void copy_records(const uint8_t* const* from, uint8_t* base, const uint64_t* to, size_t count, uint32_t bytes,
                  bool past_caches);

}  // namespace headgate
