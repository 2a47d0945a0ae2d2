// What the data plane counts, and the times of its latest tickets.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "store/histogram.h"

namespace headgate {

struct Counters {
  using Count = std::atomic<uint64_t>;
  Count tickets{0}, runs{0}, runs_ok{0}, runs_error{0}, runs_stale{0};
  Count records_copied{0}, bytes_copied{0}, extent_hits{0}, extent_misses{0}, evictions{0};
  Count nvme_read_bytes{0}, nvme_read_ops{0}, nvme_through_bytes{0}, nvme_write_bytes{0}, crc_errors{0};
  Count wakes{0}, sleeps{0}, store_bytes{0}, warm_bytes{0}, seed_bytes{0}, promotes_dropped{0};
  Count records_pulled{0};  // that a worker was told to read itself
  Count pulls_late{0};      // workers that have not read them in time
  Count polls{0};           // short naps while a device may post
  Count hints_dropped{0};   // reads ahead that found their queue full, or no memory
  Count runs_late{0};       // given up at their deadline
  Count runs_starved{0};    // waits for a frame or for planning memory
  Count portions{0};        // plans made: parts of runs that were served at once
  Count worker_faults{0};   // unexpected exceptions; those of a ring cost its worker its registration
  Count calls_late{0};      // commands that a copy thread did not end in time
  Histograms times;
};

inline void add(Counters::Count& count, uint64_t n = 1) { count.fetch_add(n, std::memory_order_relaxed); }

// ring, seq, step << 16 | layer, seen, first copy, done (ns)
using TraceRow = std::array<uint64_t, 6>;

class Trace {
 public:
  void record(const TraceRow& row) {
    std::lock_guard lock(mutex_);
    rows_[written_++ % kRows] = row;
  }
  std::vector<TraceRow> drain() {
    std::lock_guard lock(mutex_);
    uint64_t first = written_ > drained_ + kRows ? written_ - kRows : drained_;
    std::vector<TraceRow> out;
    for (; first < written_; ++first) out.push_back(rows_[first % kRows]);
    drained_ = written_;
    return out;
  }

 private:
  static constexpr uint64_t kRows = 4096;
  std::mutex mutex_;
  std::array<TraceRow, kRows> rows_{};
  uint64_t written_ = 0, drained_ = 0;
};

}  // namespace headgate
