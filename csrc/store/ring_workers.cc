// How workers come to a copy thread and leave it, and what it knows of their slots and uploads.
#include <algorithm>

#include "ring/futex.h"
#include "store/ring_service.h"

namespace headgate {

void RingService::add_ring(const std::shared_ptr<Worker>& worker, std::unique_ptr<RingConsumer> ring) {
  worker->check_open();  // a ring of a closed shard would stay behind when it goes
  if (!worker->shards[thread_]) join(worker);
  Shard& shard = shard_of(*worker);
  const size_t number = worker->rings.size();
  rings_.reserve(rings_.size() + 1);
  shard.rings.push_back(std::make_unique<RingWork>(shard, std::move(ring), number));
  // Not every bell of many rings wakes this thread at once (Bells): the first ring of each worker goes first.
  auto behind = std::upper_bound(rings_.begin(), rings_.end(), number,
                                 [](size_t n, const RingWork* other) { return n < other->number; });
  rings_.insert(behind, shard.rings.back().get());
}

// Takes all the memory that the worker's leaving will need.
void RingService::join(const std::shared_ptr<Worker>& worker) {
  workers_.reserve(workers_.size() + 1);
  leaving_.reserve(leaving_.size() + workers_.size() + 1);
  closing_.reserve(leaving_.size() + workers_.size() + 1);
  std::unique_ptr<Owner>& owner = owners_[worker->owner];
  if (!owner)
    owner = std::make_unique<Owner>(worker->owner, frames_.account(worker->owner), turns_, transfers_.roots());
  worker->shards[thread_] = std::make_unique<Shard>(*worker, std::make_unique<WorkerTurns>(*owner));
  ++owner->workers;
  workers_.push_back(worker);
}

// The first thread that closes its shard tells the others, which do so at their next look: none waits for another.
void RingService::close(Shard& shard) {
  if (shard.closed) return;
  shard.closed = true;
  if (!shard.worker.closed.exchange(true)) alarm_();
  std::erase_if(rings_, [&](const RingWork* ring) { return &ring->shard == &shard; });
  next_look_ = next_tend_ = 0;
  for (auto& ring : shard.rings) {
    ring->consumer->poison();
    ring->cancelling = nullptr;
    ring->rest();
  }
  for (TransferLeaf& leaf : shard.turns->transfers) leaf.rest();
  closing_.push_back(&shard);
}

// Ends some runs of a closed worker, and the pins of what it reads; true when there are none. Nobody reads the cells of
// dead rings.
bool RingService::end_runs(Shard& shard) {
  const uint64_t end_ns = now_ns() + kGiveUpNs;
  for (auto& ring : shard.rings) {
    for (size_t i = ring->tasks.size(); ring->live > 0 && i-- > 0;) {
      if (ring->tasks[i]->ended) continue;
      if (now_ns() >= end_ns) return false;
      count(Status::kPoison);
      end(*ring->tasks[i]);
    }
    // Behind the poison that close() has stored: whoever still reads these frames looks for it afterwards.
    while (ring->pulled.release(UINT64_MAX, kUnpinAtOnce, frames_))
      if (now_ns() >= end_ns) return false;
  }
  std::erase(closing_, &shard);
  return true;
}

void RingService::close_all() {
  for (auto& worker : workers_) close(shard_of(*worker));
  while (!closing_.empty()) end_runs(*closing_.back());
}

bool RingService::remove_worker(Worker& worker) {
  Shard& shard = shard_of(worker);
  close(shard);
  if (!end_runs(shard)) return false;
  auto found = std::find_if(workers_.begin(), workers_.end(), [&](const auto& w) { return w.get() == &worker; });
  if (found == workers_.end()) return true;
  if (at_rest(shard)) {
    part(shard);
  } else {
    leaving_.push_back(*found);
  }
  workers_.erase(found);
  return true;
}

bool RingService::at_rest(const Shard& shard) {
  return std::all_of(shard.rings.begin(), shard.rings.end(), [](const auto& ring) { return ring->tasks.empty(); });
}

// Its owner's share goes with the owner's last worker.
void RingService::part(Shard& shard) {
  shard.turns->part();
  auto owner = owners_.find(shard.worker.owner);
  if (--owner->second->workers > 0) return;
  ahead_.forget_owner(shard.worker.owner);
  owners_.erase(owner);
}

bool RingService::set_slot(Worker& worker, uint32_t number, const Slot& now) {
  Shard& shard = shard_of(worker);
  Slot& slot = shard.slots[number];
  const bool ends = slot.binding && (now.epoch != slot.epoch || !now.binding);
  if (ends && !give_up(shard, false, number)) return false;
  slot = now;
  return true;
}

void RingService::add_upload(Worker& worker, uint32_t number, const std::shared_ptr<Upload>& upload) {
  shard_of(worker).uploads[number] = upload;
}

bool RingService::drop_upload(Worker& worker, uint32_t number) {
  Shard& shard = shard_of(worker);
  shard.uploads.erase(number);
  return give_up(shard, true, number);
}

uint64_t RingService::runs_in_flight() const {
  uint64_t count = 0;
  for (auto& worker : workers_)
    for (auto& ring : shard_of(*worker).rings) count += ring->live;
  return count;
}

}  // namespace headgate
