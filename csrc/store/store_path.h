// Serves STORE runs: a staged map and its records become checked blocks of an upload's file, and what their worker
// grades of them is put into DRAM as well.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/counters.h"
#include "store/direct_io.h"
#include "store/gather_path.h"
#include "store/io_engine.h"
#include "store/run_task.h"

namespace headgate {

class StorePath {
 public:
  StorePath(Frames& frames, IoEngine& io, Counters& counters);
  std::span<uint8_t> memory() const { return {buffers_.data(), buffers_.bytes()}; }

  // Checks the run and claims its segment: kNone, or why not.
  Fault begin(RunTask& t);
  // kTransfer: write() is to be called until nothing is left to write, as there is room. kNothing: the run is over
  // (t.fault says how) and its segment is filled or free again.
  Need step(RunTask& t);
  static bool all_written(const RunTask& t) { return t.fault != Fault::kNone || t.next_block == t.blocks; }
  bool room() const { return !free_.empty(); }
  // Packs the next blocks, the map's first, and queues their write, unless they are refused; returns the bytes that
  // this was worth. Only while there is room.
  uint64_t write(RunTask& t);
  // For a run that was given up, once its writes have ended: its segment is free again.
  void drop(RunTask& t);
  void landed(const Io& io, int error);

 private:
  void end_segment(RunTask& t, bool written);
  void seed(const RunTask& t, const Io& io);

  Frames& frames_;
  IoEngine& io_;
  Counters& counters_;
  BlockBuffer buffers_;
  std::vector<uint32_t> free_;
};

}  // namespace headgate
