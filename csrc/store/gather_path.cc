#include "store/gather_path.h"

#include <algorithm>
#include <bit>

#include "ring/futex.h"

namespace headgate {
namespace {

// One step copies about this much: some 10 us from DRAM, which is how long a neighbour's ticket waits at most.
constexpr uint32_t kStepBytes = 128 << 10;
constexpr uint32_t kStepRecordsMin = 16;
// A window whose pages were never touched costs a page fault per record: then a step ends by time.
constexpr uint64_t kStepNs = 20'000;
constexpr uint32_t kRecordsAtOnce = 64;  // between two looks at the time

// A portion that has to be read bounds what one run pins and plans; many reads at once keep the disk busy.
constexpr uint32_t kPortionExtents = 256;
constexpr uint32_t kPortionRecords = 8192;
constexpr uint64_t kPlanBytesMax = 8 << 20;  // all kept portions of this thread
constexpr uint64_t kPortionBytesMax =
    kPortionExtents * sizeof(ExtentUse) + kPortionRecords * (sizeof(uint16_t) + sizeof(uint32_t));
constexpr uint32_t kFramesWorthPlanning = 8;

// A smaller run is still in a cache when attention reads it.
constexpr uint64_t kCachedBytes = 1 << 20;

// Planning costs about as much as copying this much per record.
constexpr uint64_t kPlanCost = 64;

uint32_t step_records(uint32_t record_bytes) { return std::max(kStepRecordsMin, kStepBytes / record_bytes); }

uint64_t bytes_of(const Portion& p) {
  return sizeof(Portion) + p.uses.size() * sizeof(ExtentUse) + p.places.size() * (sizeof(uint16_t) + sizeof(uint32_t));
}

}  // namespace

GatherPath::GatherPath(Frames& frames, IoEngine& io, Counters& counters)
    : frames_(frames), io_(io), counters_(counters) {
  plan_.uses.reserve(kPortionExtents);
  plan_.offsets.reserve(kPortionRecords);
  plan_.places.reserve(kPortionRecords);
  pairs_.resize(kPortionRecords);
  landings_.reserve(io.depth());
}

Fault GatherPath::validate(const Run& run, Op op, uint16_t layer, const Binding& binding,
                           const RingGeometry& geometry) {
  if (run.kind != 0 || !binding.has_lane(layer, run.lane)) return Fault::kInvalidArgument;
  uint64_t end = uint64_t{run.first_pair} + run.pair_count;
  if (op != Op::kRange) return end <= geometry.pairs_max ? Fault::kNone : Fault::kInvalidArgument;
  uint64_t places = binding.window(layer, run.lane).places;
  bool inside = end <= binding.records() && run.arg <= places && run.pair_count <= places - run.arg &&
                run.arg <= UINT32_MAX - run.pair_count;
  return inside ? Fault::kNone : Fault::kInvalidArgument;
}

Fault GatherPath::validate(std::span<const Pair> pairs, const Run& run, uint16_t layer, const Binding& binding) {
  uint32_t record_max = 0, place_max = 0;
  for (const Pair& pair : pairs) {
    record_max = std::max(record_max, pair.record);
    place_max = std::max(place_max, pair.place);
  }
  bool inside = pairs.empty() || (record_max < binding.records() && place_max < binding.window(layer, run.lane).places);
  return inside ? Fault::kNone : Fault::kInvalidArgument;
}

Need GatherPath::step(RunTask& t, bool may_read, uint64_t& cost) {
  if (t.fault != Fault::kNone || t.cursor == t.total) return release(t), Need::kNothing;
  if (!t.portion) return t.cold ? begin_cold(t, may_read, cost) : begin_hot(t, cost);
  Portion& p = *t.portion;
  if (p.next_use == 0 && p.copied == 0) {
    frames_.refresh(p.uses);
    cost += p.uses.size() * kPlanCost;
    if (!std::all_of(p.uses.begin(), p.uses.end(), [](const ExtentUse& use) { return use.ready; })) {
      bool tried = all_claimed(t) && p.next_read > 0;
      p.next_read = 0;
      return tried ? Need::kOther : Need::kTransfer;
    }
  }
  deliver_some(t, p, cost);
  if (p.next_use < p.uses.size()) return Need::kTurn;
  t.cursor += uint32_t(p.places.size());
  release(t);
  return t.cursor == t.total ? Need::kNothing : Need::kTurn;
}

// Serves from frames what one step can copy: nothing is kept beyond it.
Need GatherPath::begin_hot(RunTask& t, uint64_t& cost) {
  uint32_t records = step_records(t.binding().record_bytes());
  if (!plan(t, std::min(t.total - t.cursor, records), kPortionExtents)) return Need::kNothing;
  cost += plan_.places.size() * kPlanCost;
  size_t pinned = frames_.acquire(plan_.uses, 0);
  if (pinned < plan_.uses.size()) {
    t.cold = true;
    uint32_t served = plan_.uses[pinned].first;
    plan_.uses.resize(pinned);
    plan_.places.resize(served);
  }
  if (pinned == 0) return Need::kTurn;
  t.cursor += deliver_some(t, plan_, cost);
  frames_.release(plan_.uses);
  return t.cursor == t.total ? Need::kNothing : Need::kTurn;
}

// Pins what a portion needs, as far as its owner's share of the free frames goes, and keeps the plan until it is read.
Need GatherPath::begin_cold(RunTask& t, bool may_read, uint64_t& cost) {
  uint32_t room = may_read ? cold_max(t) : 0;
  if (room == 0) return Need::kFrames;
  if (!plan(t, std::min(t.total - t.cursor, kPortionRecords), kPortionExtents)) return Need::kNothing;
  cost += plan_.places.size() * kPlanCost;
  size_t pinned = frames_.acquire(plan_.uses, room);
  if (pinned < plan_.uses.size()) {
    uint32_t served = plan_.uses[pinned].first;
    plan_.uses.resize(pinned);
    plan_.places.resize(served);
    plan_.offsets.resize(served);
  }
  if (pinned == 0) return Need::kFrames;
  t.cold = std::any_of(plan_.uses.begin(), plan_.uses.end(), [](const ExtentUse& use) { return !use.ready; });
  keep(t);
  return t.cold ? Need::kTransfer : Need::kTurn;
}

// Copies the records' descriptors out of shared memory, checks them and finds their extents and places. False: a pair
// is wrong. Records of earlier portions may have reached their places by then, all within the worker's own lane, where
// nothing is read before the run's cell says OK.
bool GatherPath::plan(RunTask& t, uint32_t records, size_t extents) {
  add(counters_.portions);
  const Binding& binding = t.binding();
  const uint32_t record_bytes = binding.record_bytes();
  const uint32_t per_block_count = records_per_block(record_bytes);
  const Divider per_block(per_block_count), per_extent(frames_.extent_blocks());
  const bool paired = t.op == Op::kGather;
  if (paired) {
    std::span<Pair> pairs(pairs_.data(), records);
    t.ring->consumer->copy_pairs(*t.ticket, t.run.first_pair + t.cursor, pairs);
    t.fault = validate(pairs, t.run, t.layer, binding);
    if (t.fault != Fault::kNone) return false;
  }
  plan_.uses.clear();
  plan_.offsets.resize(records);
  plan_.places.resize(records);
  plan_.next_read = plan_.next_use = plan_.copied = 0;
  RecordOrigin origin{0, 0, 0};
  PackFile* pack = nullptr;
  uint32_t segment_block = 0;
  uint32_t i = 0;
  for (; i < records; ++i) {
    uint32_t record = paired ? pairs_[i].record : t.run.first_pair + t.cursor + i;
    if (record < origin.first || record >= origin.end) {
      origin = binding.origin(record);
      pack = &binding.pack(origin.pack);
      segment_block = pack->segment_block(0, t.layer, t.run.lane);
    }
    uint32_t index = record - origin.first;
    uint32_t block_in_segment = per_block(index);
    uint32_t block = segment_block + block_in_segment;
    uint32_t extent = per_extent(block);
    uint32_t block_in_extent = block - extent * frames_.extent_blocks();
    if (plan_.uses.empty() || plan_.uses.back().extent != extent || plan_.uses.back().pack != pack) {
      if (plan_.uses.size() == extents) break;
      plan_.uses.push_back({pack, extent, kNoFrame, i, 0, 0, 0, false, false});
    }
    plan_.uses.back().wanted |= uint16_t(1u << block_in_extent);
    ++plan_.uses.back().count;
    uint32_t offset = (index - block_in_segment * per_block_count) * record_bytes;
    plan_.offsets[i] = uint16_t(block_in_extent * kBlockBytes + offset);
    plan_.places[i] = paired ? pairs_[i].place : uint32_t(t.run.arg) + t.cursor + i;
  }
  plan_.offsets.resize(i);
  plan_.places.resize(i);
  return true;
}

// The plan in memory of its own, exactly as large as it is.
void GatherPath::keep(RunTask& t) {
  try {
    t.portion = std::make_unique<Portion>(plan_);
  } catch (...) {
    frames_.release(plan_.uses);
    throw;
  }
  uint64_t bytes = bytes_of(*t.portion);
  plan_bytes_ += bytes;
  Owner& owner = t.shard->turns->owner;
  owner.plan_bytes += bytes;
  ++owner.portions[t.bulk()];
  owner.frames.held[t.bulk()].fetch_add(uint32_t(t.portion->uses.size()), std::memory_order_relaxed);
}

void GatherPath::release(RunTask& t) {
  if (!t.portion) return;
  frames_.release(t.portion->uses);
  uint64_t bytes = bytes_of(*t.portion);
  plan_bytes_ -= bytes;
  Owner& owner = t.shard->turns->owner;
  owner.plan_bytes -= bytes;
  --owner.portions[t.bulk()];
  owner.frames.held[t.bulk()].fetch_sub(uint32_t(t.portion->uses.size()), std::memory_order_relaxed);
  t.portion.reset();
}

// How many frames the run may wait for; 0: not now. Its owner holds no more than is left free, and bulk half of that,
// so that whoever comes next finds some, whatever thread its runs are on; one that holds nothing on this thread gets a
// frame if there is any. An owner with a limit has a tier of that size. The same goes for planning memory.
uint32_t GatherPath::cold_max(const RunTask& t) const {
  const Owner& owner = t.shard->turns->owner;
  uint32_t tier = std::min(frames_.tier(owner.frames), owner.frames.limit.load(std::memory_order_relaxed));
  uint32_t free = std::min(frames_.unpinned(owner.frames), owner.frames.pinnable());
  uint32_t portion = std::min(kPortionExtents, std::max(1u, tier / 4));
  uint32_t share = t.bulk() ? free / 2 : free;
  uint32_t left = share - std::min(share, owner.frames.held[t.bulk()].load(std::memory_order_relaxed));
  if (owner.portions[t.bulk()] == 0) return std::min({std::max(left, 1u), free, portion});
  uint64_t memory_left = kPlanBytesMax - std::min(kPlanBytesMax, plan_bytes_);
  bool worth_planning = left >= std::min(kFramesWorthPlanning, portion);
  if (!worth_planning || owner.plan_bytes + kPortionBytesMax > memory_left) return 0;
  return std::min(left, portion);
}

uint64_t GatherPath::read(RunTask& t, size_t count) {
  Portion& p = *t.portion;
  std::span<ExtentUse> uses(p.uses.data() + p.next_read, std::min(count, p.uses.size() - p.next_read));
  frames_.claim(uses);
  uint64_t bytes = 0;
  for (const ExtentUse& use : uses) {
    t.io_in_flight += read(use, &t);
    bytes += uint64_t(std::popcount(use.to_read)) * kBlockBytes;
  }
  p.next_read += uses.size();
  return bytes;
}

uint32_t GatherPath::read(const ExtentUse& use, RunTask* run) {
  uint32_t reads = 0;
  for (uint32_t left = use.to_read; left != 0; ++reads) {
    uint32_t first = uint32_t(std::countr_zero(left));
    uint32_t count = uint32_t(std::countr_one(left >> first));
    left &= ~(((1u << count) - 1) << first);
    Io io{};
    io.site = run ? Site::kGather : Site::kReadAhead;
    io.fd = use.pack->fd();
    io.buffer = frames_.address(use.frame) + uint64_t{first} * kBlockBytes;
    io.bytes = count * kBlockBytes;
    io.offset = (uint64_t{use.extent} * frames_.extent_blocks() + first + 1) * kBlockBytes;
    io.run = run;
    io.bulk = run && run->bulk();
    io.pack = use.pack;
    io.frame = use.frame;
    io.extent = use.extent;
    io.first_block = first;
    io_.collect(io);
  }
  return reads;
}

void GatherPath::landed(const Io& io, int error) {
  uint32_t count = io.bytes / kBlockBytes;
  uint16_t all = uint16_t(((1u << count) - 1) << io.first_block);
  uint16_t good = 0;
  uint32_t first = io.extent * frames_.extent_blocks() + io.first_block;
  for (uint32_t b = 0; error == 0 && b < count; ++b)
    if (io.pack->block_ok(first + b, io.buffer + uint64_t{b} * kBlockBytes))
      good |= uint16_t(1u << (io.first_block + b));
  if (error == 0) {
    add(counters_.nvme_read_bytes, io.bytes);
    add(counters_.nvme_read_ops);
    add(counters_.crc_errors, uint64_t(std::popcount(uint32_t(all & ~good))));
  }
  Histograms& times = counters_.times;
  (io.run ? io.bulk ? times.read_bulk : times.read_decode : times.read_ahead).record_ns(now_ns() - io.submitted_ns);
  landings_.push_back({io.frame, good, uint16_t(all & ~good), io.run == nullptr});
  if (io.run) --io.run->io_in_flight;
  if (good == all) return;
  if (error == 0 || error == ENODATA) io.pack->damaged.store(true, std::memory_order_relaxed);
  if (!io.run || !io.run->portion) return;
  // Only a block that this run wants may fail it; the rest of the extent was read along.
  bool wanted = false;
  for (const ExtentUse& use : io.run->portion->uses) wanted |= use.frame == io.frame && (use.wanted & all & ~good) != 0;
  if (wanted) io.run->fault = error == 0 || error == ENODATA ? Fault::kDataLoss : Fault::kUnavailable;
}

void GatherPath::flush_landings() {
  if (landings_.empty()) return;
  frames_.landed(landings_);
  landings_.clear();
}

// Delivers what one step may, from where the last one stopped; every extent of the portion is ready. Returns how many
// records that were.
uint32_t GatherPath::deliver_some(RunTask& t, Portion& p, uint64_t& cost) {
  const Binding& binding = t.binding();
  const uint32_t bytes = binding.record_bytes();
  const uint32_t limit = step_records(bytes);
  const uint64_t end_ns = now_ns() + kStepNs;
  Worker& worker = t.shard->worker;
  PullWindow* const pull = t.op == Op::kGather && t.ring->consumer->device() ? worker.pull : nullptr;
  const uint64_t lane = binding.window(t.layer, t.run.lane).offset;
  if (t.ticket->first_copy_ns == 0) t.ticket->first_copy_ns = end_ns - kStepNs;
  const uint8_t* from[kRecordsAtOnce];
  uint64_t to[kRecordsAtOnce], named_at[kRecordsAtOnce], named_to[kRecordsAtOnce];
  uint32_t copied = 0, pulled = 0;
  do {
    uint32_t at_once = std::min(kRecordsAtOnce, limit - copied - pulled), count = 0, named = 0;
    while (count + named < at_once && p.next_use < p.uses.size()) {
      ExtentUse& use = p.uses[p.next_use];
      if (pull && p.copied == 0 && worker.arena->has(use.frame))
        use.kept = t.ring->pulled.keep(t.ticket->seq, use.frame);
      const uint8_t* frame = frames_.address(use.frame);
      uint32_t end = std::min(use.count, p.copied + (at_once - count - named));
      for (; p.copied < end; ++p.copied) {
        const uint32_t record = use.first + p.copied;
        const uint64_t place = lane + uint64_t{p.places[record]} * bytes;
        if (use.kept) {
          named_at[named] = worker.arena->offset(use.frame) + p.offsets[record];
          named_to[named++] = place;
        } else {
          from[count] = frame + p.offsets[record];
          to[count++] = place;
        }
      }
      if (p.copied == use.count) ++p.next_use, p.copied = 0;
    }
    t.shard->unfenced = true;
    if (count > 0) worker.window->deliver(from, to, count, bytes, t.total * uint64_t{bytes} >= kCachedBytes);
    if (named > 0) pull->name(named_to, named_at, named);
    copied += count, pulled += named;
  } while (copied + pulled < limit && p.next_use < p.uses.size() && now_ns() < end_ns);
  add(counters_.records_copied, copied);
  add(counters_.bytes_copied, copied * uint64_t{bytes});
  add(counters_.records_pulled, pulled);
  cost += copied * uint64_t{bytes} + pulled * kPlanCost;
  return copied + pulled;
}

}  // namespace headgate
