// Serves the rings of one copy thread in bounded steps: tickets, runs, transfers, deadlines.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "store/counters.h"
#include "store/gather_path.h"
#include "store/hints.h"
#include "store/io_engine.h"
#include "store/probe_path.h"
#include "store/ring_work.h"
#include "store/store_path.h"
#include "store/tier/frames.h"
#include "store/tier/read_ahead.h"
#include "store/transfers.h"

namespace headgate {

// Single-threaded. Whatever a worker posts, each call below returns after some 50 us: what takes longer goes on in the
// next one, from where it stopped.
class RingService {
 public:
  // `thread` numbers the copy threads of a data plane; `alarm` makes all of them look around.
  RingService(uint32_t thread, uint32_t io_depth, uint64_t bulk_bytes_max, uint32_t through_blocks, Frames& frames,
              Counters& counters, Trace& trace, std::function<void()> alarm);

  // The loop's steps; each says whether it did anything.
  bool reap();      // verifies what was read, frees what was written
  bool serve();     // takes tickets, plans, copies and answers, ring by ring in fair turns
  bool transfer();  // submits reads and writes by class
  void tend();      // deadlines, heartbeats

  // Whether something can be done at once; whether something waits for time, for frames or for another thread.
  bool runnable() const { return turns_.busy() || !closing_.empty(); }
  bool waiting() const { return tasks_ > 0; }
  bool pulling() const;  // whether frames wait for a worker to have read them
  bool transferring() const { return io_.busy(); }
  void wait_for_transfer(uint64_t ns) { io_.wait(ns); }
  // Where the worker that was answered last runs, as it says, from 1.
  uint32_t worker_cpu() const { return worker_cpu_; }
  const std::vector<RingWork*>& rings() const { return rings_; }  // of workers that are not closed

  // What the control plane asks for, between steps. With its first ring a worker has a shard here; other commands are
  // for workers that have one. Those that return false have more to do, and are to be called again.
  // FAILED_PRECONDITION: the worker is poisoned.
  void add_ring(const std::shared_ptr<Worker>& worker, std::unique_ptr<RingConsumer> ring);
  // Poison is final: no ticket of any ring is taken, and no run goes on.
  void close_all();
  // The same for one worker; the last reference goes when its transfers have ended.
  bool remove_worker(Worker& worker);
  // Runs of an epoch that ends end STALE.
  bool set_slot(Worker& worker, uint32_t number, const Slot& now);
  void add_upload(Worker& worker, uint32_t number, const std::shared_ptr<Upload>& upload);
  bool drop_upload(Worker& worker, uint32_t number);  // its runs end in ERROR/ABORTED
  void read_ahead(uint32_t owner, AheadJob job) { ahead_.add(owner, std::move(job)); }
  bool forget_pack(const PackFile* pack, uint64_t& next_owner) { return ahead_.forget(pack, next_owner); }
  uint64_t runs_in_flight() const;

 private:
  static constexpr uint64_t kGiveUpNs = 25'000;  // runs given up at once
  static constexpr size_t kUnpinAtOnce = 256;    // frames that a worker has read

  bool look(size_t count);
  void notice_changes();
  void serve_ring(RingWork& ring);
  bool work(RingWork& ring, uint64_t& cost);
  bool has_work(RingWork& ring);
  void take(RingWork& ring);

  bool begin_next(RingWork& ring, uint64_t& cost);
  void begin(RunTask& t, RingWork& ring, TakenTicket& ticket, uint32_t index);
  Status admit(RunTask& t);
  void cancel_next(RingWork& ring);

  void step(RunTask& t, bool may_read, uint64_t& cost);
  void finish(RunTask& t, Status status, Fault fault);
  void end(RunTask& t);
  void let_go(RunTask& t);
  void record(const RunTask& t, Status status);
  void answer(RingWork& ring, TakenTicket& ticket, uint32_t index, Status status, Fault fault);
  void count(Status status);
  void resume(RunTask& t);
  template <typename Predicate>
  bool give_up_if(RingWork& ring, uint64_t end_ns, Predicate predicate, Status status, Fault fault);
  bool give_up(Shard& shard, bool upload, uint32_t number);

  bool late(const RingWork& ring, const TakenTicket& ticket) const;
  bool give_up_late(RingWork& ring, uint64_t end_ns);
  Shard& shard_of(const Worker& worker) const { return *worker.shards[thread_]; }
  bool hear_released(RingWork& ring);

  // ring_workers.cc
  void join(const std::shared_ptr<Worker>& worker);
  void close(Shard& shard);
  bool end_runs(Shard& shard);
  static bool at_rest(const Shard& shard);
  void part(Shard& shard);

  const uint32_t thread_;
  const std::function<void()> alarm_;
  Frames& frames_;
  Counters& counters_;
  Trace& trace_;
  IoEngine io_;
  GatherPath gather_;
  StorePath store_;
  ProbePath probe_;
  ReadAhead ahead_;
  Hints hints_;
  Transfers transfers_;

  FairNode turns_;
  std::map<uint32_t, std::unique_ptr<Owner>> owners_;
  std::vector<std::shared_ptr<Worker>> workers_;
  std::vector<std::shared_ptr<Worker>> leaving_;  // removed, with transfers still in flight
  std::vector<Shard*> closing_;                   // closed, with runs that have not ended
  std::vector<RingWork*> rings_;
  std::vector<RunTask*> landed_;
  uint64_t tasks_ = 0;
  [[no_unique_address]] shim::HeldRuns<TaskList> held_;
  uint64_t releases_seen_ = 0, landings_seen_ = 0;
  bool blocked_ = false;  // some run waits for frames or for another's read
  size_t next_look_ = 0, next_tend_ = 0;
  uint64_t now_ = 0;
  Waits::OpWaits* answered_ = nullptr;  // whose commit goes on
  uint64_t answered_ns_ = 0;
  uint64_t last_heartbeat_ns_ = 0, last_tend_ns_ = 0;
  uint32_t worker_cpu_ = 0;
};

}  // namespace headgate
