// The daemon's end of one ring. Every number of a ticket is copied out of shared memory once, before anything looks at
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/ring.h"
#include "store/mapping.h"

namespace headgate {

// A ticket as it was copied, until all of its runs are terminal.
struct TakenTicket {
  uint64_t seq = 0;
  uint32_t step = 0;
  uint16_t layer = 0;
  Op op{};
  uint32_t remaining = 0;
  uint64_t seen_ns = 0;
  uint64_t first_copy_ns = 0;
  std::vector<Run> runs;
  std::vector<Pair> pairs;
};

// Used by one copy thread only, which also owns every other ring of the same worker.
class RingConsumer {
 public:
  // Formats both headers of two fresh, zeroed memories: touching every cell would cost what the peer only declared.
  // `id` names the ring in traces.
  RingConsumer(int requests_fd, int completions_fd, RingGeometry geometry, uint64_t id);

  uint64_t id() const { return id_; }
  bool dead() const;
  void poison();
  // Whether the next ticket is there and may be taken.
  bool ready() const;
  // Copies the next ticket out, or returns null. A ticket that no producer could have built poisons the ring.
  TakenTicket* take();
  // The ticket in flight with this sequence, or null.
  TakenTicket* in_flight(uint64_t seq);
  // Stores the cell of a terminal run, whose stores are already fenced. True when it was the ticket's last one.
  bool complete(TakenTicket& ticket, uint32_t run, Status status, Fault fault);
  // A ticket without an answer is terminal as soon as it is taken.
  void complete_silently(TakenTicket& ticket);
  // Wakes the worker if something was completed since the last call; true if it was asleep. Before this thread blocks.
  bool ring_if_needed();

  void heartbeat(uint64_t now) { completions().heartbeat.store(now, std::memory_order_relaxed); }
  const std::atomic<uint32_t>& bell() const { return requests().bell; }
  void set_asleep(bool asleep) { completions().asleep.store(asleep, std::memory_order_relaxed); }

 private:
  RequestsHeader& requests() const { return *reinterpret_cast<RequestsHeader*>(requests_.data()); }
  CompletionsHeader& completions() const { return *reinterpret_cast<CompletionsHeader*>(completions_.data()); }
  const Ticket& ticket_at(uint64_t seq) const {
    return *reinterpret_cast<const Ticket*>(requests_.data() + layout_.ticket_off(seq));
  }
  TakenTicket& slot(uint64_t seq) { return taken_[seq & (layout_.g.tickets - 1)]; }
  void format();
  void copy_pairs(TakenTicket& ticket);
  void advance_consumed();

  const uint64_t id_;
  const RingLayout layout_;
  Mapping requests_;
  Mapping completions_;
  std::vector<TakenTicket> taken_;
  uint64_t next_ = 1;
  uint64_t consumed_ = 0;
  bool completed_ = false;
};

}  // namespace headgate
