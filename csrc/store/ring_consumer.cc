#include "store/ring_consumer.h"

#include <cstring>

#include "ring/futex.h"

namespace headgate {
namespace {

RingLayout checked(RingGeometry geometry) {
  RingLayout layout{geometry};
  if (!layout.valid())
    throw invalid_argument("ring: tickets must be a power of two in 2..4096, runs_max 1..65535, pairs_max 1..2^24");
  return layout;
}

}  // namespace

RingConsumer::RingConsumer(int requests_fd, int completions_fd, RingGeometry geometry, bool device, uint64_t id)
    : id_(id),
      device_(device),
      layout_(checked(geometry)),
      requests_(requests_fd, layout_.requests_bytes(), PROT_READ | PROT_WRITE, "requests"),
      completions_(completions_fd, layout_.completions_bytes(), PROT_READ | PROT_WRITE, "completions"),
      taken_(geometry.tickets) {
  format();
}

void RingConsumer::format() {
  std::memset(requests_.data(), 0, sizeof(RequestsHeader) + layout_.g.tickets * sizeof(Ticket));
  std::memset(completions_.data(), 0, sizeof(CompletionsHeader));
  RequestsHeader& r = requests();
  r.version = kRingVersion, r.geometry = layout_.g, r.epoch = id_, r.device = device_, r.magic = kRingMagic;
  CompletionsHeader& c = completions();
  c.version = kRingVersion, c.geometry = layout_.g, c.epoch = id_, c.magic = kRingMagic;
  as_atomic(c.heartbeat).store(now_ns(), std::memory_order_relaxed);
  mprotect(requests_.data(), requests_.bytes(), PROT_READ);  // from now on only the worker writes there
}

bool RingConsumer::dead() const {
  return as_atomic(requests().poison).load(std::memory_order_acquire) != 0 ||
         as_atomic(completions().poison).load(std::memory_order_relaxed) != 0;
}

void RingConsumer::poison() {
  as_atomic(completions().poison).store(kPoisoned, std::memory_order_release);
  completed_ = true;
  ring_if_needed();
}

bool RingConsumer::ready() const {
  return next_ - consumed_ <= layout_.g.tickets &&
         as_atomic(ticket_at(next_).seq).load(std::memory_order_acquire) == next_;
}

TakenTicket* RingConsumer::take(uint64_t now) {
  if (!ready()) return nullptr;
  Ticket copy;
  std::memcpy(&copy, &ticket_at(next_), sizeof copy);
  if (copy.run_count > layout_.g.runs_max || copy.first_run > layout_.g.runs_max - copy.run_count) {
    poison();
    return nullptr;
  }
  TakenTicket& t = slot(next_);
  t = {};
  t.seq = next_;
  t.step = copy.step;
  t.layer = copy.layer;
  t.op = Op(copy.op);
  t.first_run = copy.first_run;
  t.run_count = t.remaining = copy.run_count;
  t.records_left = t.op == Op::kRange ? kPairsMax : layout_.g.pairs_max;
  t.seen_ns = now;
  ++next_;
  if (copy.run_count == 0) advance_consumed();
  return &t;
}

TakenTicket* RingConsumer::to_begin() {
  for (; beginning_ < next_; ++beginning_)
    if (slot(beginning_).begun < slot(beginning_).run_count) return &slot(beginning_);
  return nullptr;
}

Run RingConsumer::run(const TakenTicket& ticket, uint32_t index) const {
  Run copy;
  uint64_t offset = layout_.runs_off(ticket.seq) + uint64_t{ticket.first_run + index} * sizeof(Run);
  std::memcpy(&copy, requests_.data() + offset, sizeof copy);
  return copy;
}

void RingConsumer::copy_pairs(const TakenTicket& ticket, uint32_t first, std::span<Pair> to) const {
  uint64_t offset = layout_.pairs_off(ticket.seq) + uint64_t{first} * sizeof(Pair);
  if (!to.empty()) std::memcpy(to.data(), requests_.data() + offset, to.size_bytes());
}

TakenTicket* RingConsumer::in_flight(uint64_t seq) {
  return seq > consumed_ && seq < next_ && slot(seq).remaining > 0 ? &slot(seq) : nullptr;
}

bool RingConsumer::complete(TakenTicket& ticket, uint32_t run, Status status, Fault fault, Window& window) {
  Cell& cell = *reinterpret_cast<Cell*>(completions_.data() + layout_.cell_off(ticket.seq, run));
  window.answer(cell, {ticket.seq, uint32_t(status), uint32_t(fault)});
  completed_ = true;
  if (--ticket.remaining > 0) return false;
  advance_consumed();
  return true;
}

void RingConsumer::complete_silently(TakenTicket& ticket) {
  ticket.begun = ticket.run_count;
  ticket.remaining = 0;
  completed_ = true;
  advance_consumed();
}

void RingConsumer::advance_consumed() {
  while (consumed_ + 1 < next_ && slot(consumed_ + 1).remaining == 0) ++consumed_;
  as_atomic(completions().consumed).store(consumed_, std::memory_order_release);
}

bool RingConsumer::ring_if_needed() {
  if (!completed_) return false;
  completed_ = false;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (as_atomic(requests().asleep).load(std::memory_order_relaxed) == 0) return false;
  as_atomic(completions().bell).fetch_add(1, std::memory_order_relaxed);
  futex_wake(completions().bell);
  return true;
}

}  // namespace headgate
