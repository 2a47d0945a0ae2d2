// Which of the latest runs wanted each record of a pack: what an order of its records is learnt from (KVDrive §7.2).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "core/ring.h"
#include "store/direct_io.h"

namespace headgate {

// Thread-safe. A bit for each record in each sampled run, those of a run side by side: a new run has few words to clear
// in the middle of a step. What threads overwrite of each other at the same moment is lost, and nothing depends on it.
class RunSamples {
 public:
  static constexpr uint32_t kRuns = 64;  // of a segment that are remembered
  static constexpr uint32_t kEvery = 4;  // of so many runs one is, behind the first kRuns

  // Null if it would take `held` beyond `limit`, bytes, or there is no memory. What it takes is counted in `held`.
  static std::unique_ptr<RunSamples> within(uint64_t limit, std::atomic<uint64_t>& held, uint32_t segments,
                                            uint32_t tokens);
  ~RunSamples() { held_.fetch_sub(words_.bytes(), std::memory_order_relaxed); }

  // A run, or a portion of one, wants these records of a segment; the pack's first one is `first`. Portions of a run
  // have one number, another one than the segment's run before; with another run's between them they count as two runs.
  void note(uint32_t segment, uint32_t number, uint32_t first, std::span<const Pair> pairs);
  // u64[segments, tokens]: a bit for each run.
  void copy(std::span<uint64_t> to) const;

 private:
  RunSamples(std::atomic<uint64_t>& held, uint64_t bytes, uint32_t segments, uint32_t tokens);
  uint64_t* run(uint64_t segment, uint32_t run) const;

  std::atomic<uint64_t>& held_;
  const uint32_t segments_, tokens_, run_words_;
  const BlockBuffer words_;
  const std::unique_ptr<std::atomic<uint64_t>[]> runs_;  // of each segment: how many << 32 | the last one's number
};

}  // namespace headgate
