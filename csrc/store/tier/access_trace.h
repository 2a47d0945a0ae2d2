// What runs wanted of the tier, extent by extent, while somebody listens.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace headgate {

// An extent of a run's plan, of which something was copied or has to be read. Where a step of the run ends within an
// extent, the next one tells of it again.
struct Access {
  uint64_t time_ns;  // CLOCK_MONOTONIC
  uint64_t pack;     // the first eight bytes of its build
  uint32_t extent;   // of the pack
  uint32_t owner;    // the worker's uid
  uint32_t worker;
  uint32_t slot_epoch;
  uint16_t slot;  // with worker and epoch it names a session's stay there
  uint16_t layer;
  uint16_t lane;
  uint16_t wanted;   // blocks, a bit each
  uint16_t records;  // of them
  uint8_t hit;       // every wanted block was in DRAM
  uint8_t bulk;      // RANGE, not GATHER
  uint32_t run;      // one of the latest of its slot, layer and lane
};
static_assert(sizeof(Access) == 48 && offsetof(Access, slot) == 32);

// Thread-safe. One listener at a time; without one, looking whether there is one is all that it costs.
class AccessTrace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Of everybody from now on until `end_ns`, whether or not the listener comes back. FAILED_PRECONDITION: another
  // listens. RESOURCE_EXHAUSTED: no memory.
  void start(uint64_t end_ns);
  // What has come since, and how many were dropped in all, because nobody fetched the last ones.
  std::pair<std::vector<Access>, uint64_t> drain();
  // Frees all that it takes. Idempotent.
  void stop();

  void record(std::span<const Access> accesses);

 private:
  static constexpr size_t kAccessesMax = 1 << 17;  // 6 MiB, and as much that is being fetched

  std::atomic<bool> on_{false};
  std::mutex mutex_;
  bool listening_ = false;
  uint64_t end_ns_ = 0;
  uint64_t dropped_ = 0;
  std::vector<Access> accesses_;
};

}  // namespace headgate
