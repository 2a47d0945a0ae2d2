// The daemon's end of one ring. Every number is copied out of shared memory once, before anything looks at it: the
// ticket when it is taken, a run when it is begun, pairs when their portion is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/ring.h"
#include "ring/word.h"
#include "store/faults.h"
#include "store/mapping.h"
#include "store/window.h"

namespace headgate {

// A ticket as it was copied, until all of its runs are terminal. Its runs and pairs stay in shared memory.
struct TakenTicket {
  uint64_t seq = 0;
  uint32_t step = 0;
  uint16_t layer = 0;
  Op op{};
  bool cancelled = false;
  uint32_t first_run = 0;
  uint32_t run_count = 0;
  uint32_t begun = 0;         // runs
  uint32_t remaining = 0;     // runs that are not terminal
  uint32_t records_left = 0;  // what further runs may name together
  [[no_unique_address]] shim::TicketFaults faults;
  uint64_t seen_ns = 0;
  uint64_t first_copy_ns = 0;
};

// Used by one copy thread only; made by any.
class RingConsumer {
 public:
  // Formats both headers of two fresh, zeroed memories: touching every cell would cost what the peer only declared.
  // `id` names the ring in traces. device: its producer can wake nobody, and marks when it may post.
  RingConsumer(int requests_fd, int completions_fd, RingGeometry geometry, bool device, uint64_t id);

  uint64_t id() const { return id_; }
  const RingGeometry& geometry() const { return layout_.g; }
  bool device() const { return device_; }
  bool dead() const;
  void poison();
  // Whether the next ticket is there and may be taken.
  bool ready() const;
  // Copies the next ticket out, or returns null. A ticket that no producer could have built poisons the ring.
  TakenTicket* take(uint64_t now);
  // The oldest ticket taken with runs that have not begun, or null.
  TakenTicket* to_begin();
  // The ticket in flight with this sequence, or null.
  TakenTicket* in_flight(uint64_t seq);
  // Copies a run's descriptor; `index` < run_count.
  Run run(const TakenTicket& ticket, uint32_t index) const;
  // Copies pairs [first, first + to.size()), which lie below pairs_max.
  void copy_pairs(const TakenTicket& ticket, uint32_t first, std::span<Pair> to) const;
  // Stores the cell of a terminal run, of which everything delivered is already fenced.
  // True when it was the ticket's last one.
  bool complete(TakenTicket& ticket, uint32_t run, Status status, Fault fault, Window& window);
  // A ticket without an answer is terminal as soon as it has been looked through.
  void complete_silently(TakenTicket& ticket);
  // Wakes the worker if something was completed since the last call; true if it was asleep. Before this thread blocks.
  bool ring_if_needed();

  void heartbeat(uint64_t now) { as_atomic(completions().heartbeat).store(now, std::memory_order_relaxed); }
  // Where the worker posted last, and where it was answered, from 1; whatever the worker likes.
  uint32_t worker_cpu() const { return as_atomic(requests().cpu).load(std::memory_order_relaxed); }
  void say_cpu(uint32_t cpu) {
    if (cpu != said_cpu_) as_atomic(completions().cpu).store(said_cpu_ = cpu, std::memory_order_relaxed);
  }
  // 0 unless a device may post meanwhile; another number for each burst of steps.
  uint64_t stepping() const { return device_ ? as_atomic(requests().stepping).load(std::memory_order_acquire) : 0; }
  // What tickets up to this one were answered with its device has read; whatever its worker likes.
  uint64_t released() const { return as_atomic(requests().released).load(std::memory_order_acquire); }
  const uint32_t& bell() const { return requests().bell; }
  void set_asleep(bool asleep) { as_atomic(completions().asleep).store(asleep, std::memory_order_relaxed); }

 private:
  RequestsHeader& requests() const { return *reinterpret_cast<RequestsHeader*>(requests_.data()); }
  CompletionsHeader& completions() const { return *reinterpret_cast<CompletionsHeader*>(completions_.data()); }
  const Ticket& ticket_at(uint64_t seq) const {
    return *reinterpret_cast<const Ticket*>(requests_.data() + layout_.ticket_off(seq));
  }
  TakenTicket& slot(uint64_t seq) { return taken_[seq & (layout_.g.tickets - 1)]; }
  void format();
  void advance_consumed();

  const uint64_t id_;
  const bool device_;
  const RingLayout layout_;
  Mapping requests_;
  Mapping completions_;
  std::vector<TakenTicket> taken_;
  uint64_t next_ = 1;
  uint64_t beginning_ = 1;  // every ticket before it has begun all of its runs
  uint64_t consumed_ = 0;
  bool completed_ = false;
  uint32_t said_cpu_ = 0;
};

}  // namespace headgate
