// One run in the hands of a copy thread, from its ticket to its cell.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/ring.h"
#include "store/frames.h"
#include "store/ring_consumer.h"
#include "store/upload.h"
#include "store/worker.h"

namespace headgate {

struct RunTask {
  // where it came from; ring is null once its cell is stored or its worker is gone
  RingConsumer* ring;
  TakenTicket* ticket;
  uint32_t index;
  Worker* worker;
  Run run;
  uint16_t layer;
  Op op;

  uint64_t not_before_ns;  // an injected delay
  bool fail_at_end;        // an injected fault
  bool ended;              // its cell is stored (or never will be); only I/O may still be in flight
  Fault fault;             // why it will end in ERROR
  uint32_t io_in_flight;

  // GATHER, RANGE: pairs [cursor, portion_end) are being served, total in all
  uint32_t cursor, portion_end, total;
  std::vector<ExtentUse> uses;    // of the portion; pinned
  std::vector<uint16_t> offsets;  // of each record of the portion within its extent, bytes

  // STORE
  std::shared_ptr<Upload> upload;
  uint32_t next_block, blocks;  // within the segment

  Pair pair(uint32_t i) const {
    if (op == Op::kRange) return {run.first_pair + i, uint32_t(run.arg) + i};
    return ticket->pairs[run.first_pair + i];
  }
  const Binding& binding() const { return *worker->slots[run.slot].binding; }
};

}  // namespace headgate
