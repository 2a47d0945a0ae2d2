// The worker's end of one ring. The order of operations is that of csrc/protocol/README.md.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/cell.h"
#include "core/ring.h"
#include "ring/futex.h"
#include "ring/word.h"

namespace headgate {

struct RingError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NoCredit : RingError {
  using RingError::RingError;
};
struct RingTimeout : RingError {
  using RingError::RingError;
};
struct RingPoisoned : RingError {
  using RingError::RingError;
};

struct RunResult {
  uint32_t status;
  uint32_t aux;
};

// Called every kCheckInNs of a long wait; what it throws ends the wait, and the ticket stays in flight.
using CheckIn = std::function<void()>;
inline constexpr uint64_t kCheckInNs = 100'000'000;
inline constexpr uint64_t kCreditSpinNs = 30'000;
inline constexpr uint64_t kCreditSleepNs = 50'000;

// One thread posts and waits; poison() may come from any thread.
class RingProducer {
 public:
  // Maps both memories, completions read-only. RingError if the headers are not those of this version.
  RingProducer(int requests_fd, int completions_fd) {
    try {
      read_geometry(requests_fd);
      requests_ = map(requests_fd, layout_.requests_bytes(), PROT_READ | PROT_WRITE);
      completions_ = map(completions_fd, layout_.completions_bytes(), PROT_READ);
      if (mine().magic != kRingMagic || peer().magic != kRingMagic || peer().version != kRingVersion ||
          std::memcmp(&peer().geometry, &layout_.g, sizeof layout_.g) != 0 || peer().epoch != mine().epoch)
        throw RingError("the two memories are not one ring");
    } catch (...) {
      close();
      throw;
    }
    posted_.resize(layout_.g.tickets);
  }
  RingProducer(const RingProducer&) = delete;
  RingProducer& operator=(const RingProducer&) = delete;
  ~RingProducer() { close(); }

  const RingGeometry& geometry() const { return layout_.g; }
  uint32_t in_flight() const { return in_flight_; }
  bool poisoned() const {
    return !requests_ || !completions_ || as_atomic(mine().poison).load(std::memory_order_acquire) != 0 ||
           as_atomic(peer().poison).load(std::memory_order_acquire) != 0;
  }

  // Posts a ticket; runs index `pairs` from 0. Throws NoCredit, RingPoisoned, std::invalid_argument (limits).
  // A ticket's cells may be read before it counts as consumed, so credit is waited for, at most timeout_us; for a
  // ticket that the caller itself has not collected it is refused at once.
  uint64_t post(Op op, uint32_t step, uint16_t layer, std::span<const Run> runs, std::span<const Pair> pairs,
                uint64_t timeout_us, const CheckIn& check_in = {}) {
    check_limits(op, runs, pairs);
    if (poisoned()) throw RingPoisoned("the ring is poisoned");
    const uint64_t t = next_;
    Posted& p = posted(t);
    if (t > layout_.g.tickets) await_credit(t - layout_.g.tickets, timeout_us, check_in);
    if (!runs.empty()) std::memcpy(requests_ + layout_.runs_off(t), runs.data(), runs.size_bytes());
    if (!pairs.empty()) std::memcpy(requests_ + layout_.pairs_off(t), pairs.data(), pairs.size_bytes());
    Ticket& ticket = *reinterpret_cast<Ticket*>(requests_ + layout_.ticket_off(t));
    ticket.step = step;
    ticket.layer = layer;
    ticket.micro_batch = 0;
    ticket.op = uint16_t(op);
    ticket.run_count = uint16_t(runs.size());
    ticket.first_run = 0;
    say_cpu();
    as_atomic(ticket.seq).store(t, std::memory_order_release);
    ring();
    bool answered = op != Op::kPromote;
    p.seq = t;
    p.collected = !answered;
    p.missing = answered ? uint32_t(runs.size()) : 0;
    p.results.assign(answered ? runs.size() : 0, RunResult{0, 0});
    in_flight_ += answered;
    ++next_;
    return t;
  }

  // Whether a hint finds room at once, and leaves half of the ring to tickets that somebody waits for.
  bool has_room_for_hint() const {
    const uint64_t kept = layout_.g.tickets / 2;
    return !poisoned() && posted_[next_ & (layout_.g.tickets - 1)].collected &&
           (next_ <= kept || as_atomic(peer().consumed).load(std::memory_order_acquire) + kept >= next_);
  }

  // What is known of a ticket; status 0 is not done yet. Collects it once everything is known.
  const std::vector<RunResult>& poll(uint64_t seq) {
    Posted& p = find(seq);
    if (p.collected) return p.results;
    if (poisoned()) throw RingPoisoned("the ring is poisoned");  // before the cells: their window may be abandoned
    look(p);
    return p.results;
  }

  // Until every run is terminal: spins, unless that would keep the daemon from running, then sleeps. At the deadline
  // the ring is poisoned: RingTimeout.
  const std::vector<RunResult>& wait(uint64_t seq, uint64_t timeout_us, uint64_t spin_us,
                                     const CheckIn& check_in = {}) {
    Posted& p = find(seq);
    if (p.collected) return p.results;
    const uint64_t start = now_ns();
    const uint64_t deadline = start + timeout_us * 1000;
    const uint64_t spin_end = std::min(deadline, start + spin_us * 1000);
    bool done = false;
    do {
      if (poisoned()) throw RingPoisoned("the ring is poisoned");
      if ((done = look(p)) || as_atomic(peer().cpu).load(std::memory_order_relaxed) == this_cpu()) break;
      cpu_relax();
    } while (now_ns() < spin_end);
    while (!done && !asleep_once(p, deadline))
      if (check_in) check_in();
    if (done) return p.results;
    if (poisoned()) throw RingPoisoned("the ring is poisoned");
    if (look(p)) return p.results;
    poison();
    throw RingTimeout("ticket " + std::to_string(seq) + " is not done after " + std::to_string(timeout_us) +
                      " us; the ring is poisoned");
  }

  // Of a device's ring: brackets what the device does, since it cannot wake the daemon. `begin_steps` comes before the
  // launch, and again before 3/4 of the worker's wait have passed without an answer, which is how long it is believed;
  // `end_steps` when the device has ended. Throws RingPoisoned, std::logic_error for a ring that this side posts to.
  void begin_steps() {
    require_device();
    as_atomic(mine().stepping).store(++bursts_, std::memory_order_relaxed);
    ring();
  }
  void end_steps() {
    require_device();
    as_atomic(mine().stepping).store(0, std::memory_order_relaxed);
  }

  // The two memories, for a device that posts and waits by itself; null once closed.
  const RingLayout& layout() const { return layout_; }
  uint8_t* requests() const { return requests_; }
  const uint8_t* completions() const { return completions_; }

  void poison() {
    if (!requests_) return;
    as_atomic(mine().poison).store(kPoisoned, std::memory_order_release);
    if (completions_) ring();
  }

  uint64_t heartbeat_ns() const {
    return completions_ ? as_atomic(peer().heartbeat).load(std::memory_order_relaxed) : 0;
  }

  void close() {
    if (requests_) munmap(requests_, layout_.requests_bytes());
    if (completions_) munmap(completions_, layout_.completions_bytes());
    requests_ = completions_ = nullptr;
  }

 private:
  struct Posted {
    uint64_t seq = 0;
    bool collected = true;
    uint32_t missing = 0;
    std::vector<RunResult> results;
  };

  RequestsHeader& mine() const { return *reinterpret_cast<RequestsHeader*>(requests_); }
  const CompletionsHeader& peer() const { return *reinterpret_cast<const CompletionsHeader*>(completions_); }
  Posted& posted(uint64_t seq) { return posted_[seq & (layout_.g.tickets - 1)]; }

  Posted& find(uint64_t seq) {
    if (!completions_) throw RingPoisoned("the ring is closed");
    Posted& p = posted(seq);
    if (seq == 0 || p.seq != seq) throw std::invalid_argument("ticket " + std::to_string(seq) + " is not in flight");
    return p;
  }

  static uint8_t* map(int fd, uint64_t bytes, int protection) {
    struct stat info;
    if (fstat(fd, &info) != 0 || uint64_t(info.st_size) < bytes) throw RingError("a ring memory is too small");
    void* at = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) throw RingError("mmap of a ring memory failed");
    return static_cast<uint8_t*>(at);
  }

  void read_geometry(int fd) {
    uint8_t* at = map(fd, sizeof(RequestsHeader), PROT_READ);
    const RequestsHeader& header = *reinterpret_cast<const RequestsHeader*>(at);
    bool known = header.magic == kRingMagic && header.version == kRingVersion;
    layout_ = RingLayout{header.geometry};
    munmap(at, sizeof(RequestsHeader));
    if (!known || !layout_.valid()) throw RingError("not a ring of version " + std::to_string(kRingVersion));
  }

  void check_limits(Op op, std::span<const Run> runs, std::span<const Pair> pairs) const {
    if (runs.empty() || runs.size() > layout_.g.runs_max)
      throw std::invalid_argument("a ticket has 1.." + std::to_string(layout_.g.runs_max) + " runs, not " +
                                  std::to_string(runs.size()));
    if (pairs.size() > layout_.g.pairs_max)
      throw std::invalid_argument("a ticket has at most " + std::to_string(layout_.g.pairs_max) + " pairs, not " +
                                  std::to_string(pairs.size()));
    if (op != Op::kGather && op != Op::kPromote) return;
    for (const Run& run : runs)
      if (uint64_t{run.first_pair} + run.pair_count > pairs.size())
        throw std::invalid_argument("a run reaches beyond its ticket's pairs");
  }

  void require_device() const {
    if (!requests_) throw RingPoisoned("the ring is closed");
    if (mine().device == 0) throw std::logic_error("the ring was not registered as a device's");
  }

  void await_credit(uint64_t old, uint64_t timeout_us, const CheckIn& check_in) {
    if (!posted(old).collected) throw NoCredit("ticket " + std::to_string(old) + " is not collected yet");
    const uint64_t start = now_ns();
    const uint64_t deadline = start + timeout_us * 1000;
    uint64_t checked_ns = start;
    while (as_atomic(peer().consumed).load(std::memory_order_acquire) < old) {
      if (poisoned()) throw RingPoisoned("the ring is poisoned");
      const uint64_t now = now_ns();
      if (now >= deadline)
        throw NoCredit("ticket " + std::to_string(old) + " is not consumed after " + std::to_string(timeout_us) +
                       " us");
      if (check_in && now - checked_ns >= kCheckInNs) {
        check_in();
        checked_ns = now;
      }
      if (now - start < kCreditSpinNs)
        cpu_relax();
      else
        std::this_thread::sleep_for(std::chrono::nanoseconds(kCreditSleepNs));
    }
  }

  // Reads the cells that are new; true when none is missing any more, and the ticket is collected.
  bool look(Posted& p) {
    if (p.collected) return true;
    for (uint32_t run = 0; run < p.results.size(); ++run) {
      if (p.results[run].status != 0) continue;
      CellValue value = load_cell(*reinterpret_cast<const Cell*>(completions_ + layout_.cell_off(p.seq, run)));
      if (value.seq != p.seq) continue;
      p.results[run] = {value.status, value.aux};
      --p.missing;
    }
    if (p.missing > 0) return false;
    p.collected = true;
    --in_flight_;
    return true;
  }

  // One turn of sleeping; true when there is a reason to stop: ready, poisoned, or the deadline.
  bool asleep_once(Posted& p, uint64_t deadline) {
    uint32_t seen = as_atomic(peer().bell).load(std::memory_order_relaxed);
    as_atomic(mine().asleep).store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool stop = poisoned() || look(p) || now_ns() >= deadline;
    if (!stop) futex_wait(peer().bell, seen, std::min(deadline, now_ns() + kCheckInNs));
    as_atomic(mine().asleep).store(0, std::memory_order_relaxed);
    return stop;
  }

  void say_cpu() {
    if (const uint32_t cpu = this_cpu(); cpu != said_cpu_)
      as_atomic(mine().cpu).store(said_cpu_ = cpu, std::memory_order_relaxed);
  }

  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (as_atomic(peer().asleep).load(std::memory_order_relaxed) == 0) return;
    as_atomic(mine().bell).fetch_add(1, std::memory_order_relaxed);
    futex_wake(mine().bell);
  }

  RingLayout layout_{};
  uint8_t* requests_ = nullptr;
  uint8_t* completions_ = nullptr;
  std::vector<Posted> posted_;
  uint64_t next_ = 1;
  uint64_t bursts_ = 0;
  uint32_t in_flight_ = 0;
  uint32_t said_cpu_ = 0;
};

}  // namespace headgate
