// Serves PROBE runs: lines that say where they belong, delivered like records, and read back where the window can be.
#pragma once

#include <cstdint>

#include "store/counters.h"
#include "store/gather_path.h"

namespace headgate {

class ProbePath {
 public:
  explicit ProbePath(Counters& counters) : counters_(counters) {}

  // Checks a copied descriptor; sets what there is to do.
  static Fault begin(RunTask& t);
  // One bounded piece of work. kTurn: there is more to do. kNothing: the run is over (t.fault says how). Adds to `cost`
  // what it did, in bytes.
  Need step(RunTask& t, uint64_t& cost);

 private:
  void deliver(RunTask& t, uint32_t lines);
  bool read_back(RunTask& t, uint32_t lines);

  Counters& counters_;
};

}  // namespace headgate
