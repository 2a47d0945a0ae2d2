// One run in the hands of a copy thread, from the copy of its descriptor to its cell.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/ring.h"
#include "store/faults.h"
#include "store/ring_consumer.h"
#include "store/shard.h"
#include "store/tier/frames.h"
#include "store/waits.h"

namespace headgate {

// A part of a run that is planned, pinned, read and copied together.
struct Portion {
  std::vector<ExtentUse> uses;    // pinned
  std::vector<uint16_t> offsets;  // of each record within its extent, bytes
  std::vector<uint32_t> places;   // of each record in its lane
  size_t next_read = 0;           // uses before it have been claimed
  size_t next_use = 0;            // uses before it have been copied
  uint32_t copied = 0;            // records of next_use
  uint32_t in_flight = 0;         // reads
  uint32_t lacked = 0;            // uses that were not ready when they were pinned
  bool singly = false;            // a read of several blocks failed: each wanted one is read alone

  bool claimed() const { return next_read == uses.size(); }
  // So many more records have been copied.
  void advance(uint32_t records) {
    for (uint32_t n; records > 0; records -= n) {
      n = std::min(records, uses[next_use].count - copied);
      copied += n;
      if (copied == uses[next_use].count) ++next_use, copied = 0;
    }
  }
};

class TaskList;

struct RunTask {
  // where it came from
  RingWork* ring;
  TakenTicket* ticket;
  Shard* shard;
  uint32_t index;
  Run run;
  uint16_t layer;
  Op op;

  bool ended;             // its cell is stored, or never will be; only I/O may still be in flight
  Fault fault;            // why it will end in ERROR
  uint32_t io_in_flight;  // transfers
  [[no_unique_address]] shim::RunFaults faults;
  Spent spent;

  // GATHER, RANGE: records before the cursor are served, total in all
  uint32_t cursor, total;
  uint32_t reach;                    // records that a step may find
  bool cold;                         // its next portion will have to be read
  std::unique_ptr<Portion> portion;  // [cursor, cursor + portion->places.size())
  std::unique_ptr<Portion> ahead;    // what follows that, read while it still is

  // STORE
  std::shared_ptr<Upload> upload;
  uint32_t next_block, blocks;  // of its map, then of its records

  // bookkeeping of RingWork and TaskList
  uint32_t at;
  TaskList* list = nullptr;
  RunTask *before, *after;

  bool bulk() const { return op != Op::kGather; }
  const Binding& binding() const { return *shard->slots[run.slot].binding; }
};

// Runs that wait for the same thing, the longest waiting first. A run is in one list at most.
class TaskList {
 public:
  bool empty() const { return first_ == nullptr; }
  RunTask* front() const { return first_; }
  void push_back(RunTask& t) { insert(t, last_, nullptr); }
  void push_front(RunTask& t) { insert(t, nullptr, first_); }
  static void remove(RunTask& t) {
    if (!t.list) return;
    (t.before ? t.before->after : t.list->first_) = t.after;
    (t.after ? t.after->before : t.list->last_) = t.before;
    t.list = nullptr;
  }

 private:
  void insert(RunTask& t, RunTask* before, RunTask* after) {
    remove(t);
    t.list = this, t.before = before, t.after = after;
    (before ? before->after : first_) = &t;
    (after ? after->before : last_) = &t;
  }

  RunTask* first_ = nullptr;
  RunTask* last_ = nullptr;
};

}  // namespace headgate
