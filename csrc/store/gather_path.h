// Serves GATHER and RANGE runs: pins the extents of a portion, reads what is missing, copies records into the window or
// says where they lie.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/counters.h"
#include "store/frames.h"
#include "store/io_engine.h"
#include "store/ring_work.h"

namespace headgate {

// x / d for x < 2^28 and d <= 64 by one multiplication.
class Divider {
 public:
  explicit Divider(uint32_t d) : reciprocal_((uint64_t{1} << 34) / d + 1) {}
  uint32_t operator()(uint32_t x) const { return uint32_t(x * reciprocal_ >> 34); }

 private:
  uint64_t reciprocal_;
};

// What a run needs to go on.
enum class Need : uint8_t { kTurn, kTransfer, kOther, kFrames, kNothing };

class GatherPath {
 public:
  GatherPath(Frames& frames, IoEngine& io, Counters& counters);

  // Checks a copied descriptor, pairs excepted: kNone, or why the run is refused.
  static Fault validate(const Run& run, Op op, uint16_t layer, const Binding& binding, const RingGeometry& geometry);
  // Checks copied pairs.
  static Fault validate(std::span<const Pair> pairs, const Run& run, uint16_t layer, const Binding& binding);

  // One bounded piece of work: plans a portion, or copies some of it. kTurn: there is more to do. kTransfer: read() is
  // to be called until it is done. kOther: another run reads what this one waits for. kFrames: nothing is held, and
  // frames or planning memory are missing. kNothing: the run is over (t.fault says how) and nothing is pinned.
  // `may_read`: whether it may take frames. Adds to `cost` what it did, in bytes. May throw std::bad_alloc.
  Need step(RunTask& t, bool may_read, uint64_t& cost);
  // Claims and queues reads of the portion's next extents, about `count`; returns their bytes.
  uint64_t read(RunTask& t, size_t count);
  static bool all_claimed(const RunTask& t) { return t.portion->next_read == t.portion->uses.size(); }
  // After all reads have ended: gives up frames and planning memory.
  void release(RunTask& t);

  // A read of this thread ended. The frame's state changes at the next flush.
  void landed(const Io& io, int error);
  void flush_landings();
  // Queues the reads of use.to_read; returns how many. Without a run it is a read ahead.
  uint32_t read(const ExtentUse& use, RunTask* run);

 private:
  Need begin_hot(RunTask& t, uint64_t& cost);
  Need begin_cold(RunTask& t, bool may_read, uint64_t& cost);
  bool plan(RunTask& t, uint32_t records, size_t extents);
  void keep(RunTask& t);
  uint32_t cold_max(const RunTask& t) const;
  uint32_t deliver_some(RunTask& t, Portion& p, uint64_t& cost);

  Frames& frames_;
  IoEngine& io_;
  Counters& counters_;
  Portion plan_;  // what is not kept needs no memory of its own
  uint64_t plan_bytes_ = 0;
  std::vector<Landing> landings_;
  std::vector<Pair> pairs_;
};

}  // namespace headgate
