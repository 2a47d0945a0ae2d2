// Which read or write the disk gets next: decode before bulk before read-ahead, fair by bytes among owners and workers.
#pragma once

#include <cstdint>

#include "ring/futex.h"
#include "store/gather_path.h"
#include "store/store_path.h"
#include "store/tier/read_ahead.h"

namespace headgate {

// Holds runs, not requests: a block is claimed and a write buffer filled only when the request is submitted, so what
// waits here keeps nobody else waiting. Used by one copy thread.
class Transfers {
 public:
  Transfers(IoEngine& io, GatherPath& gather, StorePath& store, ReadAhead& ahead, uint64_t bulk_bytes_max)
      : io_(io), gather_(gather), store_(store), ahead_(ahead), bulk_bytes_max_(bulk_bytes_max) {}

  using Roots = FairNode[size_t(Transfer::kCount)];
  Roots& roots() { return roots_; }
  void add(RunTask& t);
  // The run has nothing to transfer any more, or is given up.
  void remove(RunTask& t);
  // Queues the next few requests. Calls settled(run) for each run of which everything is queued. True if it did any.
  template <typename Settled>
  bool pump(Settled settled) {
    const uint64_t before = queued_, end_ns = now_ns() + kPumpNs;
    while (queued_ - before < kAtOnce && io_.room() > 0 && (queued_ == before || now_ns() < end_ns)) {
      RunTask* t = next();
      if (!t) break;
      if (!over(*t)) transfer(*t);
      if (!over(*t)) continue;
      remove(*t);
      settled(*t);
    }
    bool ahead = !waiting() && ahead_.pump();
    return queued_ > before || ahead;
  }
  void landed(const Io& io);

 private:
  static constexpr uint64_t kAtOnce = 8;            // requests; a submit of more would hold up hot tickets
  static constexpr uint64_t kPumpNs = 50'000;       // and so would packing of more writes
  static constexpr uint32_t kDecodeBeforeBulk = 7;  // requests, while both wait

  static bool over(const RunTask& t) {
    return t.op == Op::kStore ? StorePath::all_written(t) : t.fault != Fault::kNone || GatherPath::all_claimed(t);
  }
  RunTask* next();
  bool bulk_has_room() const;
  bool ready(Transfer kind) { return roots_[size_t(kind)].busy() && (kind != Transfer::kStore || store_.room()); }
  bool waiting() const;
  RunTask* front(Transfer kind);
  void transfer(RunTask& t);

  IoEngine& io_;
  GatherPath& gather_;
  StorePath& store_;
  ReadAhead& ahead_;
  const uint64_t bulk_bytes_max_;  // in flight: a decode read waits behind no more
  Roots roots_;
  uint64_t bulk_bytes_ = 0;  // in flight
  uint32_t bulk_requests_ = 0;
  uint32_t decode_in_a_row_ = 0;
  uint64_t served_[size_t(Transfer::kCount)] = {};  // bytes
  uint64_t queued_ = 0;                             // requests, and claims that found nothing to read
};

}  // namespace headgate
