#include "store/hints.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

namespace headgate {
namespace {

constexpr uint32_t kPairsAtOnce = 1024;
constexpr uint64_t kPairCost = 64;

}  // namespace

Hints::Hints(const Frames& frames, ReadAhead& ahead, Counters& counters)
    : frames_(frames), ahead_(ahead), counters_(counters), pairs_(kPairsAtOnce) {}

uint64_t Hints::step(RingWork& ring, TakenTicket& ticket) {
  uint64_t cost = 0;
  bool known = !ticket.cancelled && begin(ring, ticket);
  if (known) {
    std::span<Pair> pairs(pairs_.data(), std::min(kPairsAtOnce, ring.promoting.pair_count - ring.promoted));
    ring.consumer->copy_pairs(ticket, ring.promoting.first_pair + ring.promoted, pairs);
    ring.promoted += uint32_t(pairs.size());
    cost = pairs.size() * kPairCost;
    const Binding& binding = *ring.shard.slots[ring.promoting.slot].binding;
    known = GatherPath::validate(pairs, ring.promoting, ticket.layer, binding) == Fault::kNone;
    try {
      if (known) read_ahead(ring, ticket, pairs);
    } catch (const std::bad_alloc&) {  // some of these are not read ahead
      add(counters_.hints_dropped);
    }
  }
  add(counters_.promotes_dropped, !known);
  if (known && ring.promoted < ring.promoting.pair_count) return cost;
  ring.promoted = 0;
  if (++ticket.begun == ticket.run_count) ring.consumer->complete_silently(ticket);
  return cost;
}

// Copies the run's descriptor once; its slot may have been bound anew since.
bool Hints::begin(RingWork& ring, TakenTicket& ticket) {
  bool first = ring.promoted == 0;
  if (first) ring.promoting = ring.consumer->run(ticket, ticket.begun);
  const Run& run = ring.promoting;
  if (run.slot >= ring.shard.slots.size()) return false;
  const Slot& slot = ring.shard.slots[run.slot];
  if (!slot.binding || slot.epoch != run.slot_epoch) return false;
  if (!first) return true;
  if (run.pair_count > ticket.records_left) return false;
  ticket.records_left -= run.pair_count;
  return GatherPath::validate(run, Op::kPromote, ticket.layer, *slot.binding, ring.consumer->geometry()) ==
         Fault::kNone;
}

void Hints::read_ahead(RingWork& ring, const TakenTicket& ticket, std::span<const Pair> pairs) {
  const Run& run = ring.promoting;
  const Binding& binding = *ring.shard.slots[run.slot].binding;
  uint32_t per_block = records_per_block(binding.record_bytes());
  AheadJob job;
  for (const Pair& pair : pairs) {
    RecordOrigin origin = binding.origin(pair.record);
    const std::shared_ptr<PackFile>& pack = binding.shared_pack(origin.pack);
    uint32_t block = pack->segment_block(0, ticket.layer, run.lane) + (pair.record - origin.first) / per_block;
    uint32_t extent = block / frames_.extent_blocks();
    if (job.pack != pack) {
      ahead_.promote(ring.shard.worker.owner, std::move(job));
      job = {pack, {}, 0};
    }
    if (job.extents.empty() || job.extents.back().extent != extent) job.extents.push_back({extent, 0});
    job.extents.back().blocks |= uint16_t(1u << block % frames_.extent_blocks());
  }
  ahead_.promote(ring.shard.worker.owner, std::move(job));
}

}  // namespace headgate
