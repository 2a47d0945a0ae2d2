// Faults that tests inject into the copy threads; all off in service.
#pragma once

#include <atomic>
#include <cstdint>

namespace headgate {

struct Faults {
  std::atomic<uint64_t> stopped{0};  // copy threads, a bit each
  std::atomic<uint32_t> delay_us{0};
  std::atomic<bool> delay_random{false};
  std::atomic<uint32_t> fail_every{0};
  std::atomic<bool> reorder{false};
  std::atomic<uint64_t> runs_seen{0};
  std::atomic<uint64_t> random{0};

  bool stops(uint32_t thread) const { return stopped.load(std::memory_order_relaxed) >> thread & 1; }

  // splitmix64: one atomic step per number, the same sequence for the same seed
  uint64_t next_random() {
    uint64_t z = random.fetch_add(0x9e3779b97f4a7c15, std::memory_order_relaxed) + 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};

}  // namespace headgate
