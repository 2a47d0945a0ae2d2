#include "store/copy_engine.h"

#include <sys/prctl.h>

#include <algorithm>

#include "core/futex.h"
#include "store/bells.h"

namespace headgate {
namespace {

constexpr uint64_t kMicrosecond = 1000;
constexpr uint64_t kNapNs = 50 * kMicrosecond;            // while something is under way; new tickets wait this long
constexpr uint64_t kHeartbeatNs = 20'000 * kMicrosecond;  // while busy
constexpr uint64_t kSleepNs = 50'000 * kMicrosecond;      // while idle: then a heartbeat
constexpr uint64_t kDrainNapNs = 1'000 * kMicrosecond;

}  // namespace

CopyEngine::CopyEngine(EngineOptions options, Frames& frames, Counters& counters, Faults& faults, Trace& trace)
    : options_(options),
      frames_(frames),
      counters_(counters),
      faults_(faults),
      trace_(trace),
      io_(options.io_depth),
      gather_(frames, io_, counters),
      store_(io_, counters),
      ahead_(frames, gather_, counters, std::max(1u, options.io_depth / 4)) {
  io_.register_memory(store_.memory());
  thread_ = std::thread([this] { loop(); });
}

CopyEngine::~CopyEngine() { stop(); }

// --- the thread ---

void CopyEngine::loop() {
  prctl(PR_SET_NAME, "headgate-copy");
  prctl(PR_SET_TIMERSLACK, kMicrosecond);
  while (!stopping_.load(std::memory_order_acquire)) {
    bool worked = run_commands();  // 1  what the control plane asks, between tickets
    if (!faults_.stopped.load(std::memory_order_relaxed)) {
      worked |= take_tickets();  // 2  copy descriptors out, check them, serve what is in frames
      worked |= reap();          // 3  verify what was read, free what was written
      worked |= advance_runs();  // 4  copy, answer
      ahead_.pump();             // 5  read ahead with what is left of the depth
      io_.submit();              // 6
      wake_workers();            // 7  before anything below blocks
      heartbeat();
    }
    wait_for_work(worked);
  }
  for (auto& worker : workers_) close_worker(*worker);
  for (; io_.busy() || !active_.empty(); io_.wait(kDrainNapNs)) {
    reap();
    advance_runs();
    io_.submit();
  }
}

bool CopyEngine::run_commands() {
  std::unique_lock lock(mutex_);
  bool any = !commands_.empty();
  while (!commands_.empty()) {
    Command& command = *commands_.front();
    commands_.pop_front();
    lock.unlock();
    try {
      (*command.work)();
    } catch (...) {
      command.error = std::current_exception();
    }
    lock.lock();
    command.done = true;
    command_done_.notify_all();
  }
  return any;
}

bool CopyEngine::take_tickets() {
  bool any = false;
  for (auto& worker : workers_) {
    if (worker->closed) continue;
    for (auto& ring : worker->rings) {
      if (ring->dead()) {
        close_worker(*worker);
        break;
      }
      TakenTicket* ticket = ring->take();
      if (!ticket) continue;
      start_ticket(*worker, *ring, *ticket);
      any = true;
    }
  }
  return any;
}

bool CopyEngine::reap() {
  size_t ended = io_.reap([this](const Io& io, int error) {
    if (io.write) {
      store_.landed(io, error);
    } else {
      gather_.landed(io, error);
      if (!io.run) ahead_.landed(io, error);
    }
  });
  gather_.flush_landings();
  return ended > 0;
}

bool CopyEngine::advance_runs() {
  bool any = false;
  for (size_t i = 0; i < active_.size();) {
    RunTask& t = *active_[i];
    if (!step(t)) {
      ++i;
      continue;
    }
    free_.push_back(&t);
    active_[i] = active_.back();
    active_.pop_back();
    any = true;
  }
  return any;
}

void CopyEngine::wake_workers() {
  for (auto& worker : workers_)
    for (auto& ring : worker->rings)
      if (ring->ring_if_needed()) add(counters_.wakes);
}

void CopyEngine::heartbeat() {
  uint64_t now = now_ns();
  if (now - last_heartbeat_ns_ < kHeartbeatNs) return;
  last_heartbeat_ns_ = now;
  for (auto& worker : workers_)
    for (auto& ring : worker->rings) ring->heartbeat(now);
}

void CopyEngine::wait_for_work(bool worked) {
  uint64_t now = now_ns();
  if (worked) last_work_ns_ = now;
  bool serving = !faults_.stopped.load(std::memory_order_relaxed);
  if (serving && io_.busy()) {
    if (!worked) io_.wait(kNapNs);
  } else if (serving && !active_.empty()) {
    if (worked) return;
    timespec nap = to_timespec(kNapNs / 2);  // delayed runs, and those that wait for frames
    nanosleep(&nap, nullptr);
  } else if (now - last_work_ns_ < options_.spin_us * kMicrosecond) {
    cpu_relax();
  } else {
    sleep();
  }
}

void CopyEngine::sleep() {
  static thread_local Bells bells;
  bells.clear();
  bells.add(command_word_);
  auto each_ring = [this](auto visit) {
    for (auto& worker : workers_)
      if (!worker->closed)
        for (auto& ring : worker->rings) visit(*ring);
  };
  each_ring([](RingConsumer& ring) { bells.add(ring.bell()); });
  each_ring([](RingConsumer& ring) { ring.set_asleep(true); });
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!anything_to_take()) {
    add(counters_.sleeps);
    bells.wait(now_ns() + kSleepNs);
  }
  each_ring([](RingConsumer& ring) { ring.set_asleep(false); });
}

bool CopyEngine::anything_to_take() const {
  if (stopping_.load(std::memory_order_acquire)) return true;
  {
    std::lock_guard lock(mutex_);
    if (!commands_.empty()) return true;
  }
  if (faults_.stopped.load(std::memory_order_relaxed)) return false;
  for (auto& worker : workers_)
    if (!worker->closed)
      for (auto& ring : worker->rings)
        if (ring->dead() || ring->ready()) return true;
  return false;
}

// --- tickets and runs ---

void CopyEngine::start_ticket(Worker& worker, RingConsumer& ring, TakenTicket& ticket) {
  add(counters_.tickets);
  if (ticket.op == Op::kPromote) return promote(worker, ring, ticket);
  order_.resize(ticket.runs.size());
  for (uint32_t i = 0; i < order_.size(); ++i) order_[i] = i;
  if (faults_.reorder.load(std::memory_order_relaxed))
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[faults_.next_random() % i]);
  for (uint32_t index : order_) {
    RunTask& t = new_task();
    t.ring = &ring;
    t.ticket = &ticket;
    t.index = index;
    t.worker = &worker;
    t.run = ticket.runs[index];
    t.layer = ticket.layer;
    t.op = ticket.op;
    start_run(t);
  }
}

void CopyEngine::start_run(RunTask& t) {
  add(counters_.runs);
  Status status = admit(t);
  if (status != Status::kOk) {
    finish(t, status, t.fault);
    free_.push_back(&t);
    return;
  }
  uint64_t number = faults_.runs_seen.fetch_add(1, std::memory_order_relaxed) + 1;
  uint32_t every = faults_.fail_every.load(std::memory_order_relaxed);
  if (every > 0 && number % every == 0) t.fail_at_end = true, t.total /= 2;
  uint64_t delay = faults_.delay_us.load(std::memory_order_relaxed);
  if (delay > 0 && faults_.delay_random.load(std::memory_order_relaxed)) delay = faults_.next_random() % (delay + 1);
  if (delay > 0) t.not_before_ns = now_ns() + delay * kMicrosecond;
  if (step(t)) {
    free_.push_back(&t);
  } else {
    active_.push_back(&t);
  }
}

// Checks everything that the worker wrote, against what is bound now. Not kOk: t.fault says why.
Status CopyEngine::admit(RunTask& t) {
  if (t.op == Op::kCancel) {
    cancel(t);
    return Status::kOk;
  }
  if (t.op == Op::kStore) {
    t.fault = store_.begin(t);
    return t.fault == Fault::kNone ? Status::kOk : Status::kError;
  }
  t.fault = Fault::kInvalidArgument;
  if ((t.op != Op::kGather && t.op != Op::kRange) || t.run.slot >= t.worker->slots.size()) return Status::kError;
  const Slot& slot = t.worker->slots[t.run.slot];
  if (!slot.binding || slot.epoch != t.run.slot_epoch) {
    t.fault = Fault::kAborted;
    return Status::kStale;
  }
  t.fault = GatherPath::validate(t.run, t.op, t.layer, *slot.binding, *t.ticket);
  t.total = t.run.pair_count;
  return t.fault == Fault::kNone ? Status::kOk : Status::kError;
}

// CANCEL gives up the runs of an earlier ticket of its ring (arg) that are not terminal yet.
void CopyEngine::cancel(RunTask& t) {
  TakenTicket* target = t.ring->in_flight(t.run.arg);
  give_up_if([&](const RunTask& other) { return target && other.ticket == target && other.ring == t.ring; },
             Status::kError, Fault::kAborted);
}

// A hint: the extents of its pairs are read ahead. Nothing is answered, and a wrong or late hint is only counted.
void CopyEngine::promote(Worker& worker, RingConsumer& ring, TakenTicket& ticket) {
  for (const Run& run : ticket.runs) {
    bool known = run.slot < worker.slots.size() && worker.slots[run.slot].binding &&
                 worker.slots[run.slot].epoch == run.slot_epoch;
    if (!known ||
        GatherPath::validate(run, Op::kGather, ticket.layer, *worker.slots[run.slot].binding, ticket) != Fault::kNone) {
      add(counters_.promotes_dropped);
      continue;
    }
    const Binding& binding = *worker.slots[run.slot].binding;
    std::vector<AheadJob> jobs(binding.packs().size());
    uint32_t per_block = records_per_block(binding.record_bytes());
    for (uint32_t i = run.first_pair; i < run.first_pair + run.pair_count; ++i) {
      uint32_t record = ticket.pairs[i].record;
      RecordOrigin origin = binding.origin(record);
      uint32_t block =
          binding.pack(origin.pack).segment_block(0, ticket.layer, run.lane) + (record - origin.first) / per_block;
      std::vector<uint32_t>& extents = jobs[origin.pack].extents;
      uint32_t extent = block / frames_.extent_blocks();
      if (extents.empty() || extents.back() != extent) extents.push_back(extent);
    }
    for (uint32_t p = 0; p < jobs.size(); ++p) {
      if (jobs[p].extents.empty()) continue;
      jobs[p].pack = binding.shared_pack(p);
      if (!ahead_.add(std::move(jobs[p]))) add(counters_.promotes_dropped);
    }
  }
  ring.complete_silently(ticket);
}

// Goes on with a run as far as it can. True when nothing of it is left.
bool CopyEngine::step(RunTask& t) {
  bool storing = t.op == Op::kStore;
  if (t.ended) return storing ? store_.drain(t) : gather_.drain(t);
  if (t.not_before_ns > 0 && now_ns() < t.not_before_ns) return false;
  if (storing && t.fail_at_end) t.fault = Fault::kInternal;
  if (t.op != Op::kCancel && !(storing ? store_.step(t) : gather_.step(t))) return false;
  if (t.fail_at_end && t.fault == Fault::kNone) t.fault = Fault::kInternal;
  finish(t, t.fault == Fault::kNone ? Status::kOk : Status::kError, t.fault);
  return true;
}

// Stores the cell: from here on nothing of this run can reach the window.
void CopyEngine::finish(RunTask& t, Status status, Fault fault) {
  add(status == Status::kOk      ? counters_.runs_ok
      : status == Status::kStale ? counters_.runs_stale
                                 : counters_.runs_error);
  t.worker->window.fence();
  t.ended = true;
  if (t.ring->complete(*t.ticket, t.index, status, fault)) trace(*t.ring, *t.ticket);
  t.ring = nullptr;
}

void CopyEngine::give_up(RunTask& t, Status status, Fault fault) {
  if (!t.ended) finish(t, status, fault);
}

template <typename Predicate>
void CopyEngine::give_up_if(Predicate predicate, Status status, Fault fault) {
  for (RunTask* t : active_)
    if (!t->ended && predicate(*t)) give_up(*t, status, fault);
}

RunTask& CopyEngine::new_task() {
  RunTask* t;
  if (free_.empty()) {
    t = &tasks_.emplace_back();
  } else {
    t = free_.back();
    free_.pop_back();
  }
  t->not_before_ns = 0;
  t->fail_at_end = t->ended = false;
  t->fault = Fault::kNone;
  t->io_in_flight = t->cursor = t->portion_end = t->total = 0;
  return *t;
}

void CopyEngine::trace(const RingConsumer& ring, const TakenTicket& ticket) {
  trace_.record({ring.id(), ticket.seq, uint64_t{ticket.step} << 16 | ticket.layer, ticket.seen_ns,
                 ticket.first_copy_ns, now_ns()});
}

// --- commands ---

void CopyEngine::call(const std::function<void()>& command) {
  Command entry{&command, nullptr};
  std::unique_lock lock(mutex_);
  if (!accepts_commands_) throw unavailable("the data plane is closed");
  commands_.push_back(&entry);
  nudge();
  command_done_.wait(lock, [&] { return entry.done; });
  if (entry.error) std::rethrow_exception(entry.error);
}

void CopyEngine::nudge() {
  command_word_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(command_word_);
}

void CopyEngine::stop() {
  {
    std::unique_lock lock(mutex_);
    accepts_commands_ = false;
  }
  stopping_.store(true, std::memory_order_release);
  nudge();
  if (thread_.joinable()) thread_.join();
  run_commands();  // those that came too late for the thread: it is gone, so this is the only one
}

uint64_t CopyEngine::runs_in_flight() const {
  return uint64_t(std::count_if(active_.begin(), active_.end(), [](const RunTask* t) { return !t->ended; }));
}

void CopyEngine::add_worker(std::shared_ptr<Worker> worker) { workers_.push_back(std::move(worker)); }

// Poison is final: no ticket of any of its rings is taken, and no run of it goes on.
void CopyEngine::close_worker(Worker& worker) {
  worker.closed = true;
  for (auto& ring : worker.rings) ring->poison();
  give_up_if([&](const RunTask& t) { return t.worker == &worker; }, Status::kPoison, Fault::kAborted);
}

void CopyEngine::remove_worker(Worker& worker) {
  close_worker(worker);
  wake_workers();
  std::erase_if(workers_, [&](const auto& other) { return other.get() == &worker; });
}

void CopyEngine::give_up_slot(Worker& worker, uint32_t slot) {
  auto serves = [&](const RunTask& t) { return t.worker == &worker && t.op != Op::kStore && t.run.slot == slot; };
  give_up_if(serves, Status::kStale, Fault::kAborted);
  wake_workers();
}

void CopyEngine::give_up_upload(Worker& worker, uint32_t upload) {
  auto fills = [&](const RunTask& t) { return t.worker == &worker && t.op == Op::kStore && t.run.slot == upload; };
  give_up_if(fills, Status::kError, Fault::kAborted);
  wake_workers();
}

}  // namespace headgate
