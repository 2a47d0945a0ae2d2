// Serves GATHER and RANGE runs: pins the extents of a portion, reads what is missing, copies records into the window.
#pragma once

#include <cstdint>
#include <vector>

#include "store/counters.h"
#include "store/frames.h"
#include "store/io_engine.h"
#include "store/run_task.h"

namespace headgate {

// x / d for x < 2^28 and d <= 64 by one multiplication.
class Divider {
 public:
  explicit Divider(uint32_t d) : reciprocal_((uint64_t{1} << 34) / d + 1) {}
  uint32_t operator()(uint32_t x) const { return uint32_t(x * reciprocal_ >> 34); }

 private:
  uint64_t reciprocal_;
};

class GatherPath {
 public:
  GatherPath(Frames& frames, IoEngine& io, Counters& counters) : frames_(frames), io_(io), counters_(counters) {}

  // Whether the run may be served: kNone, or why not. Reads each number of the copied descriptor once more, nothing
  // else.
  static Fault validate(const Run& run, Op op, uint16_t layer, const Binding& binding, const TakenTicket& ticket);

  // Goes on as far as it can without waiting. True when the run is over (t.fault says how); nothing is pinned then.
  bool step(RunTask& t);
  // For a run that was given up: true once its reads have ended and its frames are released.
  bool drain(RunTask& t);
  // A read of this thread ended. The frame's state changes at the next flush.
  void landed(const Io& io, int error);
  void flush_landings();

  // Queues the reads of use.to_read; returns how many. Without a run it is a read ahead.
  uint32_t read(const ExtentUse& use, RunTask* run);

 private:
  bool begin_portion(RunTask& t);
  void plan_portion(RunTask& t);
  void copy_ready(RunTask& t);
  void release(RunTask& t);

  Frames& frames_;
  IoEngine& io_;
  Counters& counters_;
  std::vector<Landing> landings_;
  std::vector<const uint8_t*> from_;
  std::vector<uint8_t*> to_;
};

}  // namespace headgate
