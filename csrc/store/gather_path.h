// Serves GATHER and RANGE runs: pins the extents of a portion, reads what is missing, copies records into the window or
// says where they lie.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/counters.h"
#include "store/direct_io.h"
#include "store/disk_cost.h"
#include "store/io_engine.h"
#include "store/ring_work.h"
#include "store/tier/frames.h"

namespace headgate {

// What a run needs to go on.
enum class Need : uint8_t { kTurn, kTransfer, kLanding, kOther, kFrames, kNothing };

class GatherPath {
 public:
  // through_blocks: how many it reads through rather than make a second request.
  GatherPath(Frames& frames, IoEngine& io, Counters& counters, uint32_t through_blocks);

  // Checks a copied descriptor, pairs excepted: kNone, or why the run is refused.
  static Fault validate(const Run& run, Op op, uint16_t layer, const Binding& binding, const RingGeometry& geometry);
  // Checks copied pairs.
  static Fault validate(std::span<const Pair> pairs, const Run& run, uint16_t layer, const Binding& binding);

  // One bounded piece of work: plans a portion, or copies some of it. kTurn: there is more to do. kTransfer: read() is
  // to be called until it is done. kLanding: reads are in flight, and none is to be queued. kOther: another run reads
  // what this one waits for. kFrames: nothing is held, and frames or planning memory are missing. kNothing: the run is
  // over (t.fault says how), and nothing is pinned once no read is in flight.
  // `may_read`: whether it may take frames. Adds to `cost` what it did, in bytes. May throw std::bad_alloc.
  Need step(RunTask& t, bool may_read, uint64_t& cost);
  // Claims the portion's next extents and queues their reads, about `requests`; returns their bytes.
  uint64_t read(RunTask& t, uint32_t requests);
  static bool all_claimed(const RunTask& t) { return t.portion->claimed() && (!t.ahead || t.ahead->claimed()); }
  // The portion can be delivered as far as this run's own reads go.
  static bool landed(const RunTask& t) { return t.portion && t.portion->claimed() && t.portion->in_flight == 0; }
  // What follows the portion can be planned while its reads are in flight, so that the disk has always something to do.
  static bool rolls(const RunTask& t) {
    return t.portion && !t.ahead && t.fault == Fault::kNone && t.cursor + t.portion->places.size() < t.total;
  }
  // After all reads have ended: gives up frames and planning memory.
  void release(RunTask& t);

  // A read of this thread ended. Its frames' state changes at the next flush, of at most so many reads at once.
  static constexpr size_t kReadsPerFlush = 8;
  void landed(const Io& io, int error);
  void flush_landings();
  // Queues the reads ahead of use.to_read; returns how many.
  uint32_t read_ahead(const ExtentUse& use);

 private:
  Need serve_hot(RunTask& t, uint64_t& cost);
  uint32_t copy_hot(RunTask& t, uint32_t records, uint64_t& cost);
  static uint32_t reach(const RunTask& t);
  uint32_t deliver(RunTask& t, uint32_t found, uint64_t end_ns);
  Need begin_cold(RunTask& t, bool may_read, uint64_t& cost);
  bool roll(RunTask& t, bool may_read, uint64_t& cost);
  size_t pin(RunTask& t, uint32_t from, uint32_t room, uint64_t& cost);
  bool copy_pairs(RunTask& t, uint32_t from, uint32_t records);
  bool plan(RunTask& t, uint32_t from, uint32_t records, size_t extents);
  std::span<ExtentUse> next_to_read(Portion& p, uint32_t requests) const;
  uint64_t read_blocks(std::span<const ExtentUse> uses, uint32_t through, Io request, uint32_t& requests);
  void put_block(Io& io, uint32_t frame, uint32_t block);
  void put_through(Io& io, uint32_t blocks);
  void lose(const Io& io, int error, std::span<const uint16_t> good);
  void trace(const RunTask& t, std::span<const ExtentUse> uses);
  void learn(const RunTask& t, std::span<const ExtentUse> uses) const;
  void keep(RunTask& t, std::unique_ptr<Portion>& as);
  void drop(RunTask& t, std::unique_ptr<Portion>& portion);
  uint32_t cold_max(const RunTask& t) const;
  void deliver_some(RunTask& t, Portion& p, uint64_t& cost);
  void count(const RunTask& t, uint32_t copied, uint32_t pulled, uint64_t& cost);

  Frames& frames_;
  IoEngine& io_;
  Counters& counters_;
  const uint32_t through_;
  Portion plan_;  // what is not kept needs no memory of its own
  uint64_t plan_bytes_ = 0;
  std::vector<Landing> landings_;
  std::vector<Pair> pairs_;
  std::vector<const uint8_t*> from_;  // of a step's records
  std::vector<uint64_t> to_;
  std::vector<uint32_t> used_;  // frames of hot runs that the policy has not been told of
};

}  // namespace headgate
