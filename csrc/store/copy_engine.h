// One copy thread: serves the rings of its workers, reads what is missing, copies, answers. See `loop`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "store/counters.h"
#include "store/faults.h"
#include "store/frames.h"
#include "store/gather_path.h"
#include "store/io_engine.h"
#include "store/read_ahead.h"
#include "store/store_path.h"
#include "store/worker.h"

namespace headgate {

struct EngineOptions {
  uint32_t io_depth;
  uint32_t spin_us;
};

// Every ring, slot and window of a worker belongs to one engine, so a window has one writer, and a command that runs
// between tickets sees no copy half done: what csrc/model asks of slot epochs and counts in flight needs no atomics
// here.
class CopyEngine {
 public:
  CopyEngine(EngineOptions options, Frames& frames, Counters& counters, Faults& faults, Trace& trace);
  ~CopyEngine();

  // Runs `command` on the thread, between tickets, and waits for it; passes on what it throws. UNAVAILABLE once
  // stopped.
  void call(const std::function<void()>& command);
  // Poisons every ring, waits for the I/O in flight, ends the thread. Idempotent.
  void stop();
  // Makes the thread look around (its faults changed).
  void nudge();

  // Commands: only through call().
  void add_worker(std::shared_ptr<Worker> worker);
  void remove_worker(Worker& worker);
  void give_up_slot(Worker& worker, uint32_t slot);      // its runs end STALE
  void give_up_upload(Worker& worker, uint32_t upload);  // its runs end in ERROR/ABORTED
  bool read_ahead(AheadJob job) { return ahead_.add(std::move(job)); }
  void forget_pack(const PackFile* pack) { ahead_.forget(pack); }
  uint64_t runs_in_flight() const;

 private:
  struct Command {
    const std::function<void()>* work;
    std::exception_ptr error;
    bool done = false;
  };

  void loop();
  bool run_commands();
  bool take_tickets();
  bool reap();
  bool advance_runs();
  void wake_workers();
  void heartbeat();
  void wait_for_work(bool worked);
  void sleep();
  bool anything_to_take() const;

  void start_ticket(Worker& worker, RingConsumer& ring, TakenTicket& ticket);
  void start_run(RunTask& t);
  Status admit(RunTask& t);
  void promote(Worker& worker, RingConsumer& ring, TakenTicket& ticket);
  void cancel(RunTask& t);
  bool step(RunTask& t);
  void finish(RunTask& t, Status status, Fault fault);
  void give_up(RunTask& t, Status status, Fault fault);
  void close_worker(Worker& worker);
  template <typename Predicate>
  void give_up_if(Predicate predicate, Status status, Fault fault);
  RunTask& new_task();
  void trace(const RingConsumer& ring, const TakenTicket& ticket);

  const EngineOptions options_;
  Frames& frames_;
  Counters& counters_;
  Faults& faults_;
  Trace& trace_;
  IoEngine io_;
  GatherPath gather_;
  StorePath store_;
  ReadAhead ahead_;

  std::vector<std::shared_ptr<Worker>> workers_;
  std::deque<RunTask> tasks_;
  std::vector<RunTask*> free_;
  std::vector<RunTask*> active_;
  std::vector<uint32_t> order_;
  uint64_t last_work_ns_ = 0;
  uint64_t last_heartbeat_ns_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable command_done_;
  std::deque<Command*> commands_;
  bool accepts_commands_ = true;
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> command_word_{0};
  std::thread thread_;  // last: starts when everything else is there
};

}  // namespace headgate
