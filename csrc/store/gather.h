// Copies many small records from scattered places; the memory-bound inner loop of the daemon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headgate {

// Copies `count` records of `bytes` bytes (a multiple of 64) from from[i] to base + to[i], places of one window lane.
// past_caches: with stores that bypass the caches, for more than a cache holds; they need a fence.
void copy_records(const uint8_t* const* from, uint8_t* base, const uint64_t* to, size_t count, uint32_t bytes,
                  bool past_caches);

}  // namespace headgate
