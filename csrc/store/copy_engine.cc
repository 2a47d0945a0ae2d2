#include "store/copy_engine.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

#include "ring/futex.h"
#include "store/bells.h"

namespace headgate {
namespace {

constexpr uint64_t kMicrosecond = 1000;
constexpr uint64_t kNapNs = 50 * kMicrosecond;        // while reads are in flight; new tickets wait this long
constexpr uint64_t kPollNs = 20 * kMicrosecond;       // while a device steps, which cannot wake this thread
constexpr uint64_t kPullNs = 1'000 * kMicrosecond;    // while frames wait for a device to have read them
constexpr uint64_t kSleepNs = 50'000 * kMicrosecond;  // while idle: then a heartbeat
constexpr uint64_t kDrainNapNs = 1'000 * kMicrosecond;
constexpr uint64_t kDrainNs = 3'000'000 * kMicrosecond;  // a disk that hangs does not keep the daemon from ending
constexpr uint64_t kCommandsNs = 50 * kMicrosecond;      // then workers are served
constexpr size_t kLooks = 16;                            // at rings, between two looks at the time
constexpr auto kCallDeadline = std::chrono::seconds(5);

}  // namespace

CopyEngine::CopyEngine(EngineOptions options, Frames& frames, Counters& counters, Trace& trace,
                       std::function<void()> alarm)
    : options_(options),
      counters_(counters),
      service_(options.thread, options.io_depth, options.bulk_bytes_max, options.through_blocks, frames, counters,
               trace, std::move(alarm)) {
  thread_ = std::thread([this] { loop(); });
}

CopyEngine::~CopyEngine() { stop(); }

// --- the thread ---

void CopyEngine::loop() {
  prctl(PR_SET_NAME, "headgate-copy");
  prctl(PR_SET_TIMERSLACK, kMicrosecond);
  shim::copy_thread_begins();
  while (!stopping_.load(std::memory_order_acquire)) {
    try {
      wait_for_work(turn());
    } catch (...) {  // of no worker in particular; whatever it was, the others are served on
      add(counters_.worker_faults);
    }
  }
  drain();
}

// Every step is bounded, whatever the workers post: none of them is kept from being looked at for long.
bool CopyEngine::turn() {
  bool worked = run_commands();  // 1  what the control plane asks
  if (shim::stops(options_.thread)) return worked;
  worked |= service_.reap();      // 2  verify some of what was read, free what was written
  worked |= service_.serve();     // 3  take tickets, plan, copy and answer, in fair turns for about 50 us
  worked |= service_.transfer();  // 4  submit reads and writes: decode, then bulk, then read-ahead
  service_.tend();                // 5  give up what is late, beat
  return worked;
}

bool CopyEngine::run_commands() {
  if (!asked_.load(std::memory_order_acquire)) return false;
  std::unique_lock lock(mutex_);
  asked_.store(false, std::memory_order_relaxed);
  bool any = !calls_.empty(), paused = false;
  for (const uint64_t end_ns = now_ns() + kCommandsNs; !calls_.empty() && !paused && now_ns() < end_ns;) {
    std::shared_ptr<Call> call = calls_.front();
    call->state = State::kRunning;
    lock.unlock();
    bool done = true;
    try {
      done = (*call->command)(service_);
    } catch (...) {
      call->error = std::current_exception();
    }
    lock.lock();
    paused = !done;
    call->state = done ? State::kDone : State::kPaused;
    if (done) {
      calls_.pop_front();
    } else {
      calls_.splice(calls_.end(), calls_, calls_.begin());  // others may be shorter
    }
    call_done_.notify_all();
  }
  if (!calls_.empty()) asked_.store(true, std::memory_order_relaxed);
  return any;
}

void CopyEngine::wait_for_work(bool worked) {
  uint64_t now = now_ns();
  if (worked) last_work_ns_ = now;
  const bool serving = !shim::stops(options_.thread);
  if (serving && (worked || service_.runnable())) return;
  if (serving && service_.transferring()) {
    service_.wait_for_transfer(kNapNs);
  } else if (serving && service_.waiting()) {
    timespec nap = to_timespec(kNapNs / 2);  // for frames, mostly
    nanosleep(&nap, nullptr);
  } else if (now - last_work_ns_ < options_.spin_us * kMicrosecond && !in_the_way(now)) {
    const size_t rings = std::max<size_t>(1, service_.rings().size());
    for (size_t looks = 0; looks < kLooks && !anything_to_take(); looks += rings) cpu_relax();
  } else {
    sleep();
  }
}

// Spinning on the core of the worker that was just answered keeps that worker from posting: then this thread moves, or
// sleeps at once. The scheduler may leave both there though another core is idle.
bool CopyEngine::in_the_way(uint64_t now) {
  const uint32_t cpu = this_cpu();
  if (cpu == 0 || cpu != service_.worker_cpu()) return false;
  return !moves_.move(now) || !move_from(cpu - 1);
}

// To another core that this thread may run on; afterwards the scheduler decides again.
bool CopyEngine::move_from(uint32_t cpu) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return false;
  return sched_setaffinity(0, sizeof allowed, &allowed) == 0;
}

void CopyEngine::sleep() {
  static thread_local Bells bells;
  bells.clear();
  bells.add(command_word_);
  for (RingWork* ring : service_.rings()) bells.add(ring->consumer->bell());
  for (RingWork* ring : service_.rings()) ring->consumer->set_asleep(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint64_t now = now_ns();
  const bool stepping = a_device_steps(now);  // before the tickets: one that came before the mark went is seen
  if (!anything_to_take()) {
    add(stepping ? counters_.polls : counters_.sleeps);
    bells.wait(now + (stepping ? kPollNs : service_.pulling() ? kPullNs : kSleepNs));
  }
  for (RingWork* ring : service_.rings()) ring->consumer->set_asleep(false);
}

bool CopyEngine::anything_to_take() const {
  if (stopping_.load(std::memory_order_acquire) || asked_.load(std::memory_order_acquire)) return true;
  if (shim::stops(options_.thread)) return false;
  return std::any_of(service_.rings().begin(), service_.rings().end(),
                     [](const RingWork* ring) { return ring->dead() || ring->consumer->ready(); });
}

bool CopyEngine::a_device_steps(uint64_t now) const {
  bool any = false;
  for (RingWork* ring : service_.rings()) any |= ring->stepping(now);
  return any && !shim::stops(options_.thread);
}

void CopyEngine::drain() {
  service_.close_all();
  for (uint64_t end = now_ns() + kDrainNs; service_.transferring() && now_ns() < end;) {
    service_.wait_for_transfer(kDrainNapNs);
    try {
      service_.reap();
      service_.transfer();
    } catch (...) {
      add(counters_.worker_faults);
    }
  }
}

// --- commands ---

void CopyEngine::call(const Command& command) { wait(post(command)); }

void CopyEngine::call(std::span<CopyEngine* const> engines, const Command& command, size_t& touched) {
  touched = 0;
  std::vector<std::shared_ptr<Call>> calls(engines.size());
  std::exception_ptr error;
  for (size_t i = 0; i < engines.size(); ++i) {
    try {
      calls[i] = engines[i]->post(command);
    } catch (...) {
      error = std::current_exception();
    }
  }
  for (size_t i = 0; i < engines.size(); ++i) {
    if (!calls[i]) continue;
    try {
      engines[i]->wait(calls[i]);
      ++touched;
    } catch (...) {
      error = std::current_exception();
      touched += calls[i]->state == State::kPaused;
    }
  }
  if (error) std::rethrow_exception(error);
}

std::shared_ptr<CopyEngine::Call> CopyEngine::post(const Command& command) {
  auto call = std::make_shared<Call>(Call{&command, std::chrono::steady_clock::now() + kCallDeadline});
  std::unique_lock lock(mutex_);
  if (!accepts_calls_) throw unavailable("the data plane is closed");
  calls_.push_back(call);
  nudge();
  return call;
}

void CopyEngine::wait(const std::shared_ptr<Call>& call) {
  std::unique_lock lock(mutex_);
  auto done = [&] { return call->state == State::kDone; };
  if (!call_done_.wait_until(lock, call->deadline, done)) {
    call_done_.wait(lock, [&] { return call->state != State::kRunning; });  // what it refers to is the caller's
    if (!done()) {
      std::erase(calls_, call);
      add(counters_.calls_late);
      throw unavailable(
          "the copy thread does not answer; is the disk stuck? See the kernel's log, or restart the daemon");
    }
  }
  if (call->error) std::rethrow_exception(call->error);
}

void CopyEngine::nudge() {
  asked_.store(true, std::memory_order_release);
  as_atomic(command_word_).fetch_add(1, std::memory_order_seq_cst);
  futex_wake(command_word_);
}

void CopyEngine::stop() {
  {
    std::unique_lock lock(mutex_);
    accepts_calls_ = false;
  }
  stopping_.store(true, std::memory_order_release);
  nudge();
  if (thread_.joinable()) thread_.join();
  while (run_commands()) {  // those that came too late for the thread: it is gone, so this is the only one
  }
}

}  // namespace headgate
