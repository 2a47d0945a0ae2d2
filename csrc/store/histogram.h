// How long things took: counts by powers of two of microseconds, written by any thread without a lock.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace headgate {

class Histogram {
 public:
  static constexpr uint32_t kBounds = 25;  // 1 us, 2 us, ... 16.8 s; the last count is of what took longer

  void record_ns(uint64_t ns) {
    uint64_t us = (ns + 999) / 1000;
    uint32_t bucket = us <= 1 ? 0 : uint32_t(std::bit_width(us - 1));
    counts_[bucket < kBounds ? bucket : kBounds].fetch_add(1, std::memory_order_relaxed);
    sum_us_.fetch_add(us, std::memory_order_relaxed);
  }

  static uint64_t bound_us(uint32_t bucket) { return uint64_t{1} << bucket; }
  uint64_t count(uint32_t bucket) const { return counts_[bucket].load(std::memory_order_relaxed); }
  uint64_t sum_us() const { return sum_us_.load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kBounds + 1> counts_{};
  std::atomic<uint64_t> sum_us_{0};
};

// From the moment a ticket is taken to its last cell, and of single disk reads from submission to completion.
struct Histograms {
  Histogram ticket_gather, ticket_range, ticket_store;
  Histogram read_decode, read_bulk, read_ahead;
};

}  // namespace headgate
