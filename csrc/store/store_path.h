// Serves STORE runs: staged records become checked blocks of an upload's file.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/counters.h"
#include "store/direct_io.h"
#include "store/io_engine.h"
#include "store/run_task.h"

namespace headgate {

class StorePath {
 public:
  StorePath(IoEngine& io, Counters& counters);
  std::span<uint8_t> memory() const { return {buffers_.data(), buffers_.bytes()}; }

  // Checks the run and claims its segment: kNone, or why not.
  Fault begin(RunTask& t);
  // True when the run is over (t.fault says how) and its segment is filled or free again.
  bool step(RunTask& t);
  // For a run that was given up: true once its writes have ended and its segment is free again.
  bool drain(RunTask& t);
  void landed(const Io& io, int error);

 private:
  void write_next(RunTask& t);
  void end_segment(RunTask& t, bool written);

  IoEngine& io_;
  Counters& counters_;
  BlockBuffer buffers_;
  std::vector<uint32_t> free_;
};

}  // namespace headgate
