#include "store/ring_service.h"

#include <algorithm>
#include <new>
#include <utility>

#include "ring/futex.h"

namespace headgate {
namespace {

constexpr uint64_t kMicrosecond = 1000;
constexpr uint64_t kSliceNs = 50 * kMicrosecond;
constexpr uint64_t kTendNs = 250 * kMicrosecond;
constexpr uint64_t kHeartbeatNs = 20'000 * kMicrosecond;  // while busy

constexpr size_t kReapAtOnce = GatherPath::kReadsPerFlush;
constexpr size_t kLookAtOnce = 64;       // rings looked at in a pass
constexpr size_t kLookBetweenTurns = 8;  // and between two turns
constexpr size_t kTendAtOnce = 16;       // rings whose deadlines are checked
constexpr uint32_t kTakeAtOnce = 8;      // tickets

// What is done for a worker besides copying, as the bytes that could be copied in that time.
constexpr uint64_t kTurnCost = 16 << 10;  // a turn ends with the step that reaches it
constexpr uint64_t kStepCost = 2 << 10;
constexpr uint64_t kWakeCost = 16 << 10;  // a system call
// A step that takes longer than its bytes explain, such as one that faults in pages of the worker for the first time,
// costs its time. Most of a turn that is much longer was spent by others: this thread did not run.
constexpr uint64_t kCostPerNs = 12;
constexpr uint64_t kChargedNsMax = 200 * kMicrosecond;

Wait waits_for(Need need) {
  switch (need) {
    case Need::kTurn:
      return Wait::kQueue;
    case Need::kTransfer:
    case Need::kLanding:
    case Need::kOther:
      return Wait::kDisk;
    case Need::kFrames:
      return Wait::kPins;
    case Need::kNothing:
      return Wait::kCommit;
  }
  return Wait::kQueue;
}

}  // namespace

RingService::RingService(uint32_t thread, uint32_t io_depth, uint64_t bulk_bytes_max, uint32_t through_blocks,
                         Frames& frames, Counters& counters, Trace& trace, std::function<void()> alarm)
    : thread_(thread),
      alarm_(std::move(alarm)),
      frames_(frames),
      counters_(counters),
      trace_(trace),
      io_(io_depth),
      gather_(frames, io_, counters, through_blocks),
      store_(frames, io_, counters),
      probe_(counters),
      ahead_(frames, gather_, io_, counters),
      hints_(frames, ahead_, counters),
      transfers_(io_, gather_, store_, ahead_, bulk_bytes_max) {
  io_.register_memory(store_.memory());
  landed_.reserve(kReapAtOnce);
}

// --- the loop's steps ---

bool RingService::reap() {
  landed_.clear();
  size_t ended = io_.reap(kReapAtOnce, [this](const Io& io, int error) {
    transfers_.landed(io);
    if (io.write) {
      store_.landed(io, error);
    } else {
      gather_.landed(io, error);
      if (!io.run) ahead_.landed(io, error);
    }
    RunTask* t = io.run;
    if (t && (t->io_in_flight == 0 || (!t->ended && io.portion == t->portion.get() && GatherPath::landed(*t))))
      landed_.push_back(t);
  });
  gather_.flush_landings();
  if (ended > 0) now_ = now_ns();
  for (RunTask* t : landed_) {
    t->ring->last_progress_ns = now_;
    if (t->ended) {
      let_go(*t);
      continue;
    }
    if (GatherPath::landed(*t)) transfers_.remove(*t);  // what follows can be queued when this is delivered
    if (!t->list) resume(*t);                           // otherwise it has more to transfer
  }
  return ended > 0;
}

bool RingService::serve() {
  now_ = now_ns();
  const uint64_t end = now_ + kSliceNs;
  notice_changes();
  held_.let_go(now_, [this](RunTask& t) { resume(t); });
  bool any = !closing_.empty();
  if (any) end_runs(*closing_.back());
  any |= look(kLookAtOnce);
  while (FairNode* next = turns_.next()) {
    serve_ring(static_cast<RingWork&>(*next));
    any = true;
    if ((now_ = now_ns()) >= end) break;
    look(kLookBetweenTurns);
  }
  return any;
}

bool RingService::transfer() {
  bool any = transfers_.pump([this](RunTask& t) {
    if (t.io_in_flight == 0 || GatherPath::landed(t) || GatherPath::rolls(t)) resume(t);
  });
  io_.submit();
  return any;
}

void RingService::tend() {
  if (now_ - last_tend_ns_ < kTendNs) return;
  last_tend_ns_ = now_;
  const uint64_t end_ns = now_ + kGiveUpNs;
  for (size_t i = 0; i < kTendAtOnce && i < rings_.size(); ++i) {
    if (next_tend_ >= rings_.size()) next_tend_ = 0;
    RingWork& ring = *rings_[next_tend_];
    if (ring.pulled.late(now_, ring.shard.worker.run_ns_max)) {
      add(counters_.pulls_late);
      close(ring.shard);
      break;
    }
    if (!give_up_late(ring, end_ns)) {
      last_tend_ns_ = 0;  // goes on there
      break;
    }
    ++next_tend_;
  }
  for (size_t i = leaving_.size(); i-- > 0;)
    if (Shard& shard = shard_of(*leaving_[i]); at_rest(shard)) {
      part(shard);
      leaving_.erase(leaving_.begin() + ptrdiff_t(i));
    }
  if (now_ - last_heartbeat_ns_ < kHeartbeatNs) return;
  last_heartbeat_ns_ = now_;
  for (RingWork* ring : rings_) ring->consumer->heartbeat(now_);
}

// Looks at the next rings that are not being served: is there a ticket, or poison?
bool RingService::look(size_t count) {
  bool any = false;
  for (size_t i = 0, all = rings_.size(); i < count && i < all; ++i) {
    next_look_ = next_look_ + 1 < rings_.size() ? next_look_ + 1 : 0;
    RingWork& ring = *rings_[next_look_];
    if (ring.dead()) return close(ring.shard), true;
    any |= hear_released(ring);
    if (ring.busy() || !ring.consumer->ready()) continue;
    ring.wake();
    any = true;
  }
  return any;
}

// Frames were released or reads have landed, here or in another thread: those that waited for either try again.
void RingService::notice_changes() {
  const uint64_t releases = frames_.releases(), landings = frames_.landings();
  bool released = releases != releases_seen_, landed = landings != landings_seen_;
  if (!blocked_ || (!released && !landed)) return;
  releases_seen_ = releases;
  landings_seen_ = landings;
  blocked_ = false;
  for (RingWork* ring : rings_) {
    if (ring->starved.empty() && ring->watching.empty()) continue;
    blocked_ = true;
    if (released) ring->look_for_frames = true;
    while (RunTask* t = landed ? ring->watching.front() : nullptr) ring->ready.push_back(*t);
    ring->wake();
  }
}

// --- rings ---

// One turn of a ring. A failure costs its run or its worker, never the thread.
void RingService::serve_ring(RingWork& ring) {
  uint64_t cost = 0;
  const uint64_t began_ns = now_ = now_ns();
  answered_ = nullptr;
  try {
    if (ring.dead()) return close(ring.shard);
    take(ring);
    while (cost < kTurnCost && work(ring, cost)) {
      now_ = now_ns();
      if (answered_) Waits::commit(*std::exchange(answered_, nullptr), now_ - answered_ns_);
      cost = std::max(cost + kStepCost, kCostPerNs * std::min(now_ - began_ns, kChargedNsMax));
    }
  } catch (...) {
    add(counters_.worker_faults);
    return close(ring.shard);
  }
  ring.charge(cost + kStepCost);
  if (!has_work(ring)) ring.rest();
}

// One step of the ring's oldest work that need not wait; false if there is none.
bool RingService::work(RingWork& ring, uint64_t& cost) {
  if (ring.cancelling) return cancel_next(ring), true;
  if (RunTask* t = ring.ready.front()) return step(*t, ring.starved.empty(), cost), true;
  RunTask* starved = ring.starved.front();
  if (ring.look_for_frames && starved) return step(*starved, true, cost), true;
  return begin_next(ring, cost);
}

bool RingService::has_work(RingWork& ring) {
  if (ring.cancelling || !ring.ready.empty() || (ring.look_for_frames && !ring.starved.empty())) return true;
  const TakenTicket* ticket = ring.consumer->to_begin();
  if (ticket && (ring.live < RingWork::kWindow || ticket->cancelled || late(ring, *ticket))) return true;
  return ring.consumer->ready();
}

void RingService::take(RingWork& ring) {
  for (uint32_t i = 0; i < kTakeAtOnce && !ring.cancelling; ++i) {
    TakenTicket* ticket = ring.consumer->take(now_);
    if (!ticket) return;
    add(counters_.tickets);
    if (ticket->op == Op::kCancel && ticket->run_count > 0) ring.cancelling = ticket;
    ticket->faults.begin(ticket->run_count);
  }
}

// --- beginning runs ---

bool RingService::begin_next(RingWork& ring, uint64_t& cost) {
  TakenTicket* ticket = ring.consumer->to_begin();
  if (!ticket) return false;
  if (ticket->op == Op::kPromote) return cost += hints_.step(ring, *ticket), true;
  bool cancelled = ticket->cancelled, too_late = !cancelled && late(ring, *ticket);
  if (!cancelled && !too_late && ring.live >= RingWork::kWindow) return false;
  uint32_t index = ticket->faults.run(ticket->begun++, ticket->run_count);
  if (cancelled || too_late) {
    add(counters_.runs);
    add(counters_.runs_late, too_late);
    answer(ring, *ticket, index, Status::kError, cancelled ? Fault::kAborted : Fault::kUnavailable);
    return true;
  }
  RunTask* t = nullptr;
  try {
    t = &ring.new_task();
  } catch (const std::bad_alloc&) {
    add(counters_.runs);
    answer(ring, *ticket, index, Status::kError, Fault::kResourceExhausted);
  }
  if (t) begin(*t, ring, *ticket, index);
  return true;
}

void RingService::begin(RunTask& t, RingWork& ring, TakenTicket& ticket, uint32_t index) {
  add(counters_.runs);
  ++tasks_;
  t.ring = &ring, t.ticket = &ticket, t.shard = &ring.shard;
  t.index = index, t.run = ring.consumer->run(ticket, index), t.layer = ticket.layer, t.op = ticket.op;
  t.ended = t.cold = false;
  t.fault = Fault::kNone;
  t.io_in_flight = t.cursor = t.total = 0;
  t.reach = UINT32_MAX;
  t.spent.begin(ticket.seen_ns);
  Status status = admit(t);
  if (status != Status::kOk) return finish(t, status, t.fault);
  t.total = t.faults.begin(t.total);
  if (!held_.hold(t, now_)) ring.ready.push_back(t);
}

// Checks everything of the run's descriptor, against what is bound now. Not kOk: t.fault says why.
Status RingService::admit(RunTask& t) {
  if (t.op == Op::kStore) {
    t.fault = store_.begin(t);
    return t.fault == Fault::kNone ? Status::kOk : Status::kError;
  }
  if (t.op == Op::kProbe) {
    t.fault = ProbePath::begin(t);
    return t.fault == Fault::kNone ? Status::kOk : Status::kError;
  }
  t.fault = Fault::kInvalidArgument;
  if ((t.op != Op::kGather && t.op != Op::kRange) || t.run.slot >= t.shard->slots.size()) return Status::kError;
  const Slot& slot = t.shard->slots[t.run.slot];
  const bool leaving = t.shard->leaving && t.shard->leaving->has(t.run, t.op);
  if (!slot.binding || slot.epoch != t.run.slot_epoch || leaving) {
    t.fault = Fault::kAborted;
    return Status::kStale;
  }
  if (t.run.pair_count > t.ticket->records_left) return Status::kError;
  t.fault = GatherPath::validate(t.run, t.op, t.layer, *slot.binding, t.ring->consumer->geometry());
  if (t.fault != Fault::kNone) return Status::kError;
  t.total = t.run.pair_count;
  t.ticket->records_left -= t.total;
  return Status::kOk;
}

// CANCEL gives up the runs of an earlier ticket of its ring (arg): those under way at once, the others when their turn
// comes. After its OK nothing of them is copied.
void RingService::cancel_next(RingWork& ring) {
  TakenTicket& ticket = *ring.cancelling;
  uint32_t index = ticket.begun++;
  TakenTicket* target = ring.consumer->in_flight(ring.consumer->run(ticket, index).arg);
  if (target && target->op != Op::kCancel && !target->cancelled) {
    target->cancelled = true;
    give_up_if(ring, UINT64_MAX, [&](const RunTask& t) { return t.ticket == target; }, Status::kError, Fault::kAborted);
  }
  if (ticket.begun == ticket.run_count) ring.cancelling = nullptr;
  add(counters_.runs);
  answer(ring, ticket, index, Status::kOk, Fault::kNone);
}

// --- going on with runs, and ending them ---

void RingService::step(RunTask& t, bool may_read, uint64_t& cost) {
  RingWork& ring = *t.ring;
  bool was_starved = t.list == &ring.starved;
  TaskList::remove(t);
  t.spent.turn(Wait::kPins, now_);
  Need need;
  try {
    if (t.op == Op::kStore && t.faults.fails()) t.fault = Fault::kInternal;
    need = t.op == Op::kStore   ? store_.step(t)
           : t.op == Op::kProbe ? probe_.step(t, cost)
                                : gather_.step(t, may_read, cost);
  } catch (const std::bad_alloc&) {
    gather_.release(t);
    t.fault = Fault::kResourceExhausted;
    need = Need::kNothing;
  }
  now_ = now_ns();
  t.spent.turn(waits_for(need), now_);
  t.spent.stalled |= t.spent.wait == Wait::kDisk || t.spent.wait == Wait::kPins;
  switch (need) {
    case Need::kTurn:
      ring.last_progress_ns = now_;
      return ring.ready.push_front(t);
    case Need::kTransfer:
      return transfers_.add(t);
    case Need::kLanding:
      return;
    case Need::kOther:
      blocked_ = true;
      return ring.watching.push_back(t);
    case Need::kFrames:
      blocked_ = true;
      if (may_read) ring.look_for_frames = false;
      add(counters_.runs_starved, !was_starved);
      return was_starved ? ring.starved.push_front(t) : ring.starved.push_back(t);
    case Need::kNothing:
      if (t.faults.fails() && t.fault == Fault::kNone) t.fault = Fault::kInternal;
      return finish(t, t.fault == Fault::kNone ? Status::kOk : Status::kError, t.fault);
  }
}

// Stores the cell: from here on nothing of this run can reach the window.
void RingService::finish(RunTask& t, Status status, Fault fault) {
  t.spent.turn(Wait::kCommit, now_);
  record(t, status);
  answer(*t.ring, *t.ticket, t.index, status, fault);
  end(t);
}

// Where its time went, up to here; how long its answer takes is added when that is known.
void RingService::record(const RunTask& t, Status status) {
  Worker& worker = t.shard->worker;
  const bool stores = t.op == Op::kStore, reads = t.op == Op::kGather || t.op == Op::kRange;
  const bool bound = reads && t.run.slot < t.shard->slots.size() && t.shard->slots[t.run.slot].waits &&
                     t.shard->slots[t.run.slot].epoch == t.run.slot_epoch;
  if (!stores && !bound) return;
  Waits& waits = stores ? worker.stores : *t.shard->slots[t.run.slot].waits;
  const uint64_t moved_bytes = status != Status::kOk ? 0
                               : stores              ? uint64_t{t.next_block} * kBlockBytes
                                                     : uint64_t{t.total} * t.binding().record_bytes();
  answered_ = &waits.record(thread_, t.op, t.spent, status != Status::kOk, moved_bytes);
  answered_ns_ = now_;
  if (bound && t.spent.stalled && t.binding().has_lane(t.layer, t.run.lane))
    waits.record_stall(t.layer, t.run.lane, t.spent.ns[size_t(Wait::kPins)] + t.spent.ns[size_t(Wait::kDisk)]);
}

// The run can go on, unless its worker is closed.
void RingService::resume(RunTask& t) {
  if (t.shard->closed) return;
  if (t.op == Op::kStore ? t.io_in_flight == 0 : GatherPath::landed(t)) t.spent.turn(Wait::kQueue, now_);
  t.ring->ready.push_back(t);
  t.ring->wake();
}

void RingService::end(RunTask& t) {
  t.ended = true;
  --t.ring->live;
  transfers_.remove(t);
  TaskList::remove(t);
  if (t.io_in_flight == 0) let_go(t);
}

// Nothing of an ended run is in flight any more.
void RingService::let_go(RunTask& t) {
  if (t.op == Op::kStore) {
    store_.drop(t);
  } else {
    gather_.release(t);
  }
  --tasks_;
  t.ring->free_task(t);
}

void RingService::answer(RingWork& ring, TakenTicket& ticket, uint32_t index, Status status, Fault fault) {
  Window& window = *ring.shard.worker.window;
  // A fence of a device's window is a call of its driver: many runs that end at once must not cost one each.
  if (ring.shard.unfenced) ring.shard.unfenced = !window.fence();
  if (ring.shard.unfenced) status = Status::kError, fault = Fault::kInternal;
  count(status);
  if (status == Status::kOk) ring.last_progress_ns = now_;
  ring.consumer->say_cpu(this_cpu());
  if (!ring.consumer->complete(ticket, index, status, fault, window)) return;
  worker_cpu_ = ring.consumer->worker_cpu();
  uint64_t now = now_ns();
  ring.pulled.answered(ticket.seq, now);
  trace_.record({ring.consumer->id(), ticket.seq, uint64_t{ticket.step} << 16 | ticket.layer, ticket.seen_ns,
                 ticket.first_copy_ns, now});
  Histograms& times = counters_.times;
  if (ticket.op == Op::kGather) times.ticket_gather.record_ns(now - ticket.seen_ns);
  if (ticket.op == Op::kRange) times.ticket_range.record_ns(now - ticket.seen_ns);
  if (ticket.op == Op::kStore) times.ticket_store.record_ns(now - ticket.seen_ns);
  if (!ring.consumer->ring_if_needed()) return;
  add(counters_.wakes);
  ring.charge(kWakeCost);
}

void RingService::count(Status status) {
  add(status == Status::kOk      ? counters_.runs_ok
      : status == Status::kStale ? counters_.runs_stale
                                 : counters_.runs_error);
}

// False: the time is over, and there may be more.
template <typename Predicate>
bool RingService::give_up_if(RingWork& ring, uint64_t end_ns, Predicate predicate, Status status, Fault fault) {
  bool all = true;
  for (size_t i = ring.tasks.size(); all && i-- > 0;) {  // backwards: a run that ends is replaced by the last one
    RunTask& t = *ring.tasks[i];
    if (t.ended || !predicate(t)) continue;
    finish(t, status, fault);
    all = now_ns() < end_ns;
  }
  ring.wake();
  return all;
}

// Ends some runs of a slot or an upload, whose others do not begin any more; true when there are none. Those of a
// closed worker end elsewhere.
bool RingService::give_up(Shard& shard, bool upload, uint32_t number) {
  const uint64_t end_ns = now_ns() + kGiveUpNs;
  if (!shard.leaving) shard.leaving = Shard::Leaving{upload, number, 0};
  for (size_t& next = shard.leaving->ring; !shard.closed && next < shard.rings.size(); ++next) {
    auto leaves = [&](const RunTask& t) { return shard.leaving->has(t.run, t.op); };
    if (shard.rings[next]->live == 0) continue;
    if (now_ns() >= end_ns) return false;
    if (!give_up_if(*shard.rings[next], end_ns, leaves, upload ? Status::kError : Status::kStale, Fault::kAborted))
      return false;
  }
  shard.leaving.reset();
  return true;
}

// --- time ---

// Decode waits from when its ticket was taken, bulk from when its ring last got on: a long restore is not late.
bool RingService::late(const RingWork& ring, const TakenTicket& ticket) const {
  uint64_t since = ticket.op == Op::kGather ? ticket.seen_ns : std::max(ticket.seen_ns, ring.last_progress_ns);
  return now_ > since + ring.shard.worker.run_ns_max;
}

// The worker must hear of a slow disk before its own wait ends. A read in flight ends later, in its frame.
bool RingService::give_up_late(RingWork& ring, uint64_t end_ns) {
  auto is_late = [&](const RunTask& t) {
    bool given_up = late(ring, *t.ticket);
    add(counters_.runs_late, given_up);
    return given_up;
  };
  return ring.live == 0 || give_up_if(ring, end_ns, is_late, Status::kError, Fault::kUnavailable);
}

// --- what workers read themselves ---

bool RingService::hear_released(RingWork& ring) {
  return !ring.pulled.empty() && ring.pulled.release(ring.consumer->released(), kUnpinAtOnce, frames_);
}

bool RingService::pulling() const {
  return std::any_of(rings_.begin(), rings_.end(), [](const RingWork* ring) { return !ring->pulled.empty(); });
}

}  // namespace headgate
