#include "store/gather_path.h"

#include <algorithm>
#include <bit>

#include "ring/futex.h"
#include "store/gather.h"
#include "store/record_locator.h"

namespace headgate {
namespace {

// One step copies about this much: some 10 us from DRAM, which is how long a neighbour's ticket waits at most.
constexpr uint32_t kStepBytes = 128 << 10;
constexpr uint32_t kStepRecordsMin = 16;
// A window whose pages were never touched costs a page fault per record: then a step ends by time.
constexpr uint64_t kStepNs = 20'000;
constexpr uint32_t kLookRecords = 64;  // between two looks at the time
constexpr uint32_t kReachMore = 8;     // that a step may find, when the last one had time for all

// A portion that has to be read bounds what one run pins and plans; many reads at once keep the disk busy.
constexpr uint32_t kPortionExtents = 256;
constexpr uint32_t kPortionRecords = 8192;
constexpr uint64_t kPlanBytesMax = 8 << 20;  // all kept portions of this thread
constexpr uint64_t kPortionBytesMax =
    kPortionExtents * sizeof(ExtentUse) + kPortionRecords * (sizeof(uint16_t) + sizeof(uint32_t));
constexpr uint32_t kFramesWorthPlanning = 8;
// What is being read makes room for nothing else, and DRAM holds the less of what comes back.
constexpr uint32_t kTierPerPortion = 32;
constexpr uint32_t kTierPerOwner = 16;

// A smaller run is still in a cache when attention reads it; stores through the caches are the faster ones anyway.
constexpr uint64_t kCachedBytes = 16 << 20;

// Planning costs about as much as copying this much per record.
constexpr uint64_t kPlanCost = 64;

// Workers that step at once count their tickets alike: their runs are told apart by a bit pattern for each worker.
constexpr uint32_t kOfWorkers = 0x9e3779b9;

uint32_t step_records(uint32_t record_bytes) { return std::max(kStepRecordsMin, kStepBytes / record_bytes); }

// Read at once: this many extents are claimed under one lock, and a read of others waits behind no more than so much.
constexpr size_t kExtentsAtOnce = 64;
constexpr uint32_t kBlocksAtOnce = 64;
static_assert(kBlocksAtOnce <= IoEngine::kBeyondRoom);  // each a request of its own

// Where all that is only read through goes, of all threads.
uint8_t* scrap() {
  static_assert(DiskCost::kThroughMax * kBlockBytes <= HugePage::kBytes);
  static const HugePage page;
  return page.data();
}

// Which of the latest runs of its worker, slot, layer and lane.
uint32_t number(const RunTask& t) { return uint32_t(t.ticket->seq << 16 | t.index); }

uint16_t blocks_of(const IoPart& part) { return uint16_t(((1u << part.count) - 1) << part.first); }

uint64_t bytes_of(const Portion& p) {
  return sizeof(Portion) + p.uses.size() * sizeof(ExtentUse) + p.places.size() * (sizeof(uint16_t) + sizeof(uint32_t));
}

}  // namespace

GatherPath::GatherPath(Frames& frames, IoEngine& io, Counters& counters, uint32_t through_blocks)
    : frames_(frames), io_(io), counters_(counters), through_(std::min(through_blocks, DiskCost::kThroughMax)) {
  plan_.uses.reserve(kPortionExtents);
  plan_.offsets.reserve(kPortionRecords);
  plan_.places.reserve(kPortionRecords);
  pairs_.resize(kPortionRecords);
  landings_.reserve(kReadsPerFlush * Io::kBlocksMax);
  from_.resize(kStepBytes / kLineBytes);
  to_.resize(kStepBytes / kLineBytes);
  used_.reserve(Frames::kUsesKept + kPortionExtents);
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
  if (t.fault != Fault::kNone || t.cursor == t.total) {
    if (t.io_in_flight == 0) release(t);
    return Need::kNothing;
  }
  if (!t.portion) return t.cold ? begin_cold(t, may_read, cost) : serve_hot(t, cost);
  Portion& p = *t.portion;
  if (p.next_use == 0 && p.copied == 0) {
    if (!p.claimed()) return Need::kTransfer;
    if (p.in_flight > 0) {
      if (rolls(t) && roll(t, may_read, cost)) return Need::kTransfer;
      return t.fault == Fault::kNone ? Need::kLanding : Need::kNothing;
    }
    const Frames::Missing missing = frames_.refresh(p.uses);
    cost += p.uses.size() * kPlanCost;
    if (missing == Frames::Missing::kBeingRead) return Need::kOther;
    if (missing == Frames::Missing::kUnclaimed) return p.next_read = 0, Need::kTransfer;
  }
  deliver_some(t, p, cost);
  if (p.next_use < p.uses.size()) return Need::kTurn;
  t.cursor += uint32_t(p.places.size());
  drop(t, t.portion);
  t.portion = std::move(t.ahead);
  return t.cursor == t.total ? Need::kNothing : Need::kTurn;
}

// Serves from frames what one step can copy: nothing is kept beyond it.
Need GatherPath::serve_hot(RunTask& t, uint64_t& cost) {
  const uint32_t records = std::min(t.total - t.cursor, reach(t));
  if (!copy_pairs(t, t.cursor, records)) return Need::kNothing;
  const uint32_t begun = t.cursor;
  add(counters_.portions);
  plan_.uses.clear();
  struct Holds {
    ~Holds() { frames.let_go(uses); }
    Frames& frames;
    const std::vector<ExtentUse>& uses;
  };
  {
    const Holds holds{frames_, plan_.uses};
    t.cursor += copy_hot(t, records, cost);
  }
  auto untouched = [&](const ExtentUse& use) { return use.count == 0 || begun + use.first >= t.cursor; };
  while (!plan_.uses.empty() && untouched(plan_.uses.back())) plan_.uses.pop_back();
  if (!plan_.uses.empty()) {
    ExtentUse& last = plan_.uses.back();
    last.count = std::min(last.count, t.cursor - begun - last.first);
  }
  trace(t, plan_.uses);
  learn(t, plan_.uses);
  add(counters_.extent_hits, plan_.uses.size());
  t.spent.hits += uint32_t(plan_.uses.size());
  for (const ExtentUse& use : plan_.uses) used_.push_back(use.frame);
  frames_.tell(used_);
  return t.cursor == t.total ? Need::kNothing : Need::kTurn;
}

// Finds the next records and holds their frames, up to the first one that is not there, and copies what it has found,
// or some of it if that takes longer than a step; returns how many. Holds come before copies: a locked add behind
// stores that bypass the caches waits for all of them. What it holds is in plan_.uses.
uint32_t GatherPath::copy_hot(RunTask& t, uint32_t records, uint64_t& cost) {
  const Binding& binding = t.binding();
  const uint32_t bytes = binding.record_bytes();
  const uint64_t lane = binding.window(t.layer, t.run.lane).offset, now = now_ns();
  t.spent.turn(Wait::kCopy, now);
  Worker& worker = t.shard->worker;
  PullWindow* const pull = t.op == Op::kGather && t.ring->consumer->device() ? worker.pull : nullptr;
  if (t.ticket->first_copy_ns == 0) t.ticket->first_copy_ns = now;
  t.shard->unfenced = true;
  RecordLocator locate(binding, t.layer, t.run.lane, frames_.extent_blocks());
  const Pair* const pairs = pairs_.data();
  const uint8_t** const from = from_.data();
  uint64_t* const to = to_.data();
  ExtentRecords in{};
  ExtentUse* use = nullptr;
  const uint8_t* frame = nullptr;
  uint16_t valid = 0;
  uint32_t i = 0, found = 0, pulled = 0;
  for (; i < records; ++i) {
    const uint32_t record = pairs[i].record;
    if (!in.has(record)) {
      if (plan_.uses.size() == kPortionExtents) break;
      in = locate.extent_of(record);
      ExtentUse next{in.pack, in.extent, kNoFrame, i, 0, 0, 0, true, false};
      t.cold = !frames_.hold(next);
      if (t.cold) break;
      use = &plan_.uses.emplace_back(next);
      frame = frames_.address(use->frame);
      valid = frames_.valid(use->frame);
    }
    const RecordPlace at = locate.place(in, record);
    t.cold = (valid >> at.block & 1) == 0;
    if (t.cold) break;
    if (use->count == 0 && pull && worker.arena->has(use->frame))
      use->kept = t.ring->pulled.keep(t.ticket->seq, use->frame);
    use->wanted |= uint16_t(1u << at.block);
    ++use->count;
    const uint64_t place = lane + uint64_t{pairs[i].place} * bytes;
    if (use->kept) {
      const uint64_t line = worker.arena->offset(use->frame) + at.offset;
      pull->name(&place, &line, 1);
      ++pulled;
    } else {
      if (found * bytes < kAskedBytes) prefetch_record(frame + at.offset, bytes);
      from[found] = frame + at.offset;
      to[found++] = place;
    }
  }
  if (pulled > 0) frames_.keep(plan_.uses);
  cost += i * kPlanCost;
  shim::dawdle();
  const uint32_t copied = deliver(t, found, pulled > 0 ? UINT64_MAX : now + kStepNs);
  count(t, copied, pulled, cost);
  if (copied == found) return i;
  t.cold = false;  // nobody knows yet: there is more before that
  return copied;
}

// Records that the run's next step may find. Of one that took too long for all it had found the others are found again.
uint32_t GatherPath::reach(const RunTask& t) { return std::min(t.reach, step_records(t.binding().record_bytes())); }

// Delivers the records that were found, or some of them if that takes longer; returns how many.
uint32_t GatherPath::deliver(RunTask& t, uint32_t found, uint64_t end_ns) {
  const uint32_t bytes = t.binding().record_bytes();
  const bool past_caches = t.total * uint64_t{bytes} >= kCachedBytes;
  uint32_t done = 0;
  while (done < found && (done == 0 || now_ns() < end_ns)) {
    const uint32_t count = std::min(kLookRecords, found - done);
    t.shard->worker.window->deliver(&from_[done], &to_[done], count, bytes, past_caches);
    done += count;
  }
  t.reach = done < found ? done : reach(t) + kReachMore;
  return done;
}

void GatherPath::count(const RunTask& t, uint32_t copied, uint32_t pulled, uint64_t& cost) {
  const uint64_t bytes = t.binding().record_bytes();
  add(counters_.records_copied, copied);
  add(counters_.bytes_copied, copied * bytes);
  if (pulled > 0) add(counters_.records_pulled, pulled);
  add(t.shard->turns->owner.frames.moved_bytes, (copied + pulled) * bytes);
  cost += copied * bytes + pulled * kPlanCost;
}

// Pins what a portion needs, as far as its owner's share of the free frames goes, and keeps the plan until it is read.
Need GatherPath::begin_cold(RunTask& t, bool may_read, uint64_t& cost) {
  uint32_t room = may_read ? cold_max(t) : 0;
  if (room == 0) return Need::kFrames;
  if (pin(t, t.cursor, room, cost) == 0) return t.fault == Fault::kNone ? Need::kFrames : Need::kNothing;
  t.cold = std::any_of(plan_.uses.begin(), plan_.uses.end(), [](const ExtentUse& use) { return !use.ready; });
  keep(t, t.portion);
  if (t.cold) return Need::kTransfer;
  t.portion->next_read = t.portion->uses.size();
  return Need::kTurn;
}

// Pins and keeps what follows the portion; false if it has to wait until that is delivered, or a pair is wrong.
bool GatherPath::roll(RunTask& t, bool may_read, uint64_t& cost) {
  uint32_t room = may_read ? cold_max(t) : 0;
  if (room == 0 || pin(t, t.cursor + uint32_t(t.portion->places.size()), room, cost) == 0) return false;
  try {
    keep(t, t.ahead);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// Plans a portion from a record on, and pins as much of it as there are frames for, `room` of them not ready at most;
// returns how many extents.
size_t GatherPath::pin(RunTask& t, uint32_t from, uint32_t room, uint64_t& cost) {
  if (!plan(t, from, std::min(t.total - from, kPortionRecords), kPortionExtents)) return 0;
  cost += plan_.places.size() * kPlanCost;
  size_t pinned = frames_.acquire(plan_.uses, room);
  const auto hits = std::count_if(plan_.uses.begin(), plan_.uses.begin() + ptrdiff_t(pinned),
                                  [](const ExtentUse& use) { return use.ready; });
  plan_.lacked = uint32_t(pinned - size_t(hits));
  t.spent.hits += uint32_t(hits), t.spent.misses += plan_.lacked;
  trace(t, {plan_.uses.data(), pinned});
  learn(t, {plan_.uses.data(), pinned});
  if (pinned < plan_.uses.size()) {
    uint32_t served = plan_.uses[pinned].first;
    plan_.uses.resize(pinned);
    plan_.places.resize(served);
    plan_.offsets.resize(served);
  }
  return pinned;
}

// Copies the records' descriptors out of shared memory and checks them, or makes those of a RANGE. False: a pair is
// wrong. Records of earlier portions may have reached their places by then, all within the worker's own lane, where
// nothing is read before the run's cell says OK.
bool GatherPath::copy_pairs(RunTask& t, uint32_t from, uint32_t records) {
  const std::span<Pair> pairs(pairs_.data(), records);
  if (t.op != Op::kGather) {
    const uint32_t record = t.run.first_pair + from, place = uint32_t(t.run.arg) + from;
    for (uint32_t i = 0; i < records; ++i) pairs[i] = {record + i, place + i};
    return true;
  }
  t.ring->consumer->copy_pairs(*t.ticket, t.run.first_pair + from, pairs);
  t.fault = validate(pairs, t.run, t.layer, t.binding());
  return t.fault == Fault::kNone;
}

// Finds the extents and places of as many records as lie in so many extents. False: a pair is wrong.
bool GatherPath::plan(RunTask& t, uint32_t from, uint32_t records, size_t extents) {
  if (!copy_pairs(t, from, records)) return false;
  add(counters_.portions);
  RecordLocator locate(t.binding(), t.layer, t.run.lane, frames_.extent_blocks());
  plan_.uses.clear();
  plan_.offsets.resize(records);
  plan_.places.resize(records);
  plan_.next_read = plan_.next_use = plan_.copied = 0;
  ExtentRecords in{};
  uint32_t i = 0;
  for (; i < records; ++i) {
    const auto [record, place] = pairs_[i];
    if (!in.has(record)) {
      if (plan_.uses.size() == extents) break;
      in = locate.extent_of(record);
      plan_.uses.push_back({in.pack, in.extent, kNoFrame, i, 0, 0, 0, false, false});
    }
    const RecordPlace at = locate.place(in, record);
    plan_.uses.back().wanted |= uint16_t(1u << at.block);
    ++plan_.uses.back().count;
    plan_.offsets[i] = uint16_t(at.offset);
    plan_.places[i] = place;
  }
  plan_.offsets.resize(i);
  plan_.places.resize(i);
  return true;
}

// For whoever listens.
void GatherPath::trace(const RunTask& t, std::span<const ExtentUse> uses) {
  if (!frames_.accesses().on()) return;
  const Worker& worker = t.shard->worker;
  Access at_once[64];
  for (const uint64_t now = now_ns(); !uses.empty();) {
    const size_t count = std::min(uses.size(), std::size(at_once));
    for (size_t i = 0; i < count; ++i) {
      const ExtentUse& use = uses[i];
      at_once[i] = {.time_ns = now,
                    .pack = use.pack->name(),
                    .extent = use.extent,
                    .owner = worker.owner,
                    .worker = worker.id,
                    .slot_epoch = t.run.slot_epoch,
                    .slot = uint16_t(t.run.slot),
                    .layer = t.layer,
                    .lane = t.run.lane,
                    .wanted = use.wanted,
                    .records = uint16_t(use.count),
                    .hit = use.ready,
                    .bulk = t.bulk(),
                    .run = number(t)};
    }
    frames_.accesses().record({at_once, count});
    uses = uses.subspan(count);
  }
}

// For packs of which samples are taken: the pairs that these uses are about.
void GatherPath::learn(const RunTask& t, std::span<const ExtentUse> uses) const {
  if (t.op != Op::kGather) return;
  while (!uses.empty()) {
    const ExtentUse& front = uses.front();
    size_t same = 1;
    while (same < uses.size() && uses[same].pack == front.pack) ++same;
    if (RunSamples* const samples = front.pack->samples.get()) {
      const ExtentUse& back = uses[same - 1];
      const std::span pairs(pairs_.data() + front.first, back.first + back.count - front.first);
      const uint32_t segment = t.layer * front.pack->header().kinds[0].lanes + t.run.lane;
      samples->note(segment, number(t) ^ t.shard->worker.id * kOfWorkers,
                    t.binding().origin(pairs.front().record).first, pairs);
    }
    uses = uses.subspan(same);
  }
}

// The plan in memory of its own, exactly as large as it is.
void GatherPath::keep(RunTask& t, std::unique_ptr<Portion>& as) {
  try {
    as = std::make_unique<Portion>(plan_);
  } catch (...) {
    frames_.release(plan_.uses);
    throw;
  }
  uint64_t bytes = bytes_of(*as);
  plan_bytes_ += bytes;
  Owner& owner = t.shard->turns->owner;
  owner.plan_bytes += bytes;
  ++owner.portions[t.bulk()];
  owner.frames.in_portions[t.bulk()].fetch_add(uint32_t(as->uses.size()), std::memory_order_relaxed);
  owner.frames.lacked[t.bulk()].fetch_add(as->lacked, std::memory_order_relaxed);
}

void GatherPath::release(RunTask& t) {
  drop(t, t.portion);
  drop(t, t.ahead);
}

void GatherPath::drop(RunTask& t, std::unique_ptr<Portion>& portion) {
  if (!portion) return;
  frames_.release(portion->uses);
  uint64_t bytes = bytes_of(*portion);
  plan_bytes_ -= bytes;
  Owner& owner = t.shard->turns->owner;
  owner.plan_bytes -= bytes;
  --owner.portions[t.bulk()];
  owner.frames.in_portions[t.bulk()].fetch_sub(uint32_t(portion->uses.size()), std::memory_order_relaxed);
  owner.frames.lacked[t.bulk()].fetch_sub(portion->lacked, std::memory_order_relaxed);
  portion.reset();
}

// How many frames the run may wait for; 0: not now. Its owner has no more pinned than is left free, and bulk half of
// that, so that whoever comes next finds some, whatever thread its runs are on; and it waits for no more than a small
// part of its tier. One that has nothing pinned on this thread gets a frame if there is any. An owner with a limit has
// a tier of that size. The same goes for planning memory.
uint32_t GatherPath::cold_max(const RunTask& t) const {
  const Owner& owner = t.shard->turns->owner;
  auto rest = [&](uint32_t most, const std::atomic<uint32_t>(&taken)[2]) {
    return most - std::min(most, taken[t.bulk()].load(std::memory_order_relaxed));
  };
  uint32_t tier = std::min(frames_.tier(owner.frames), owner.frames.limit.load(std::memory_order_relaxed));
  uint32_t free = std::min(frames_.unpinned(owner.frames), owner.frames.pinnable());
  uint32_t worth = std::max(1u, std::min(kFramesWorthPlanning, tier / 4));
  uint32_t portion = std::clamp(tier / kTierPerPortion, worth, kPortionExtents);
  uint32_t left = std::min(rest(t.bulk() ? free / 2 : free, owner.frames.in_portions),
                           rest(std::max(tier / kTierPerOwner, 2 * worth), owner.frames.lacked));
  if (owner.portions[t.bulk()] == 0) return std::min({std::max(left, 1u), free, portion});
  uint64_t memory_left = kPlanBytesMax - std::min(kPlanBytesMax, plan_bytes_);
  if (left < worth || owner.plan_bytes + kPortionBytesMax > memory_left) return 0;
  return std::min(left, portion);
}

uint64_t GatherPath::read(RunTask& t, uint32_t requests) {
  Portion& p = t.portion->claimed() ? *t.ahead : *t.portion;
  std::span<ExtentUse> uses = next_to_read(p, requests);
  const uint32_t through = p.singly ? 0 : through_;
  frames_.claim(uses, through);
  p.next_read += uses.size();
  Io io{};
  io.site = Site::kGather;
  io.run = &t;
  io.portion = &p;
  io.bulk = t.bulk();
  uint32_t queued = 0;
  const uint64_t bytes = read_blocks(uses, through, io, queued);
  p.in_flight += queued;
  t.io_in_flight += queued;
  t.spent.read_bytes += bytes;
  return bytes;
}

uint32_t GatherPath::read_ahead(const ExtentUse& use) {
  uint32_t requests = 0;
  Io io{};
  io.site = Site::kReadAhead;
  read_blocks({&use, 1}, 0, io, requests);
  return requests;
}

// As many as are read in about so many requests, as far as can be told before they are claimed.
std::span<ExtentUse> GatherPath::next_to_read(Portion& p, uint32_t requests) const {
  const PackFile* pack = nullptr;
  uint64_t next = 0;  // the block behind the last wanted one
  uint32_t made = 0, blocks = 0;
  size_t end = p.next_read;
  for (; end < p.uses.size() && end - p.next_read < kExtentsAtOnce; ++end) {
    const ExtentUse& use = p.uses[end];
    if (use.ready) continue;
    const uint64_t begin = uint64_t{use.extent} * frames_.extent_blocks();
    const uint64_t first = begin + uint32_t(std::countr_zero(use.wanted));
    const bool near = use.pack == pack && first >= next && first - next <= through_;
    made += !near || p.singly;
    blocks += frames_.extent_blocks();
    if (blocks > frames_.extent_blocks() && (made > requests || blocks > kBlocksAtOnce)) break;
    pack = use.pack;
    next = begin + uint32_t(std::bit_width(use.wanted));
  }
  return {p.uses.data() + p.next_read, end - p.next_read};
}

// Makes requests of what the uses have claimed, each like `request`, and adds up how many. At most `through` blocks
// between two of them are read through. Returns bytes.
uint64_t GatherPath::read_blocks(std::span<const ExtentUse> uses, uint32_t through, Io request, uint32_t& requests) {
  Io io = request;
  uint64_t next = 0, bytes = 0;  // the block behind the request
  const bool singly = request.portion && request.portion->singly;
  auto collect = [&] {
    if (io.bytes == 0) return;
    bytes += io.bytes;
    ++requests;
    io_.collect(io);
  };
  for (const ExtentUse& use : uses) {
    const uint64_t begin = uint64_t{use.extent} * frames_.extent_blocks();
    for (uint32_t left = use.to_read; left != 0; left &= left - 1) {
      const uint32_t in_frame = uint32_t(std::countr_zero(left));
      const uint64_t block = begin + in_frame;
      const bool joins = io.bytes > 0 && io.pack == use.pack && block >= next && block - next <= through && !singly &&
                         io.bytes / kBlockBytes + (block - next) < Io::kBlocksMax;
      if (joins) {
        put_through(io, uint32_t(block - next));
      } else {
        collect();
        io = request;
        io.pack = use.pack;
        io.fd = use.pack->fd();
        io.offset = (block + 1) * kBlockBytes;
      }
      put_block(io, use.frame, in_frame);
      next = block + 1;
    }
  }
  collect();
  return bytes;
}

void GatherPath::put_block(Io& io, uint32_t frame, uint32_t block) {
  uint8_t* to = frames_.address(frame) + uint64_t{block} * kBlockBytes;
  IoPart* part = io.part_count > 0 ? &io.parts[io.part_count - 1] : nullptr;
  if (part && part->frame == frame && part->first + part->count == block) {
    ++part->count;
  } else {
    io.parts[io.part_count++] = {frame, uint16_t(block), 1};
  }
  iovec* piece = io.piece_count > 0 ? &io.pieces[io.piece_count - 1] : nullptr;
  if (piece && static_cast<uint8_t*>(piece->iov_base) + piece->iov_len == to) {
    piece->iov_len += kBlockBytes;
  } else {
    io.pieces[io.piece_count++] = {to, kBlockBytes};
  }
  io.bytes += kBlockBytes;
}

void GatherPath::put_through(Io& io, uint32_t blocks) {
  if (blocks == 0) return;
  io.parts[io.part_count++] = {kNoFrame, 0, uint16_t(blocks)};
  io.pieces[io.piece_count++] = {scrap(), uint64_t{blocks} * kBlockBytes};
  io.bytes += blocks * kBlockBytes;
  add(counters_.nvme_through_bytes, uint64_t{blocks} * kBlockBytes);
}

void GatherPath::landed(const Io& io, int error) {
  uint16_t good[Io::kBlocksMax] = {};  // of each part
  uint32_t block = uint32_t(io.offset / kBlockBytes) - 1;
  bool all_good = true;
  for (uint32_t i = 0; i < io.part_count; block += io.parts[i++].count) {
    const IoPart& part = io.parts[i];
    if (part.frame == kNoFrame) continue;
    const uint8_t* data = frames_.address(part.frame) + uint64_t{part.first} * kBlockBytes;
    for (uint32_t b = 0; error == 0 && b < part.count; ++b)
      if (io.pack->block_ok(block + b, data + uint64_t{b} * kBlockBytes)) good[i] |= uint16_t(1u << (part.first + b));
    const uint16_t bad = uint16_t(blocks_of(part) & ~good[i]);
    if (error == 0) add(counters_.crc_errors, uint64_t(std::popcount(bad)));
    landings_.push_back({part.frame, good[i], bad, io.run == nullptr});
    all_good &= bad == 0;
  }
  if (error == 0) {
    add(counters_.nvme_read_bytes, io.bytes);
    add(counters_.nvme_read_ops);
  }
  Histograms& times = counters_.times;
  (io.run ? io.bulk ? times.read_bulk : times.read_decode : times.read_ahead).record_ns(now_ns() - io.submitted_ns);
  if (io.run) --io.run->io_in_flight, --io.portion->in_flight;
  if (!all_good) lose(io, error, good);
}

// Only a block that this run wants may fail it; others were read along. A request that failed for one of those, as far
// as anybody knows, is made anew for each wanted block.
void GatherPath::lose(const Io& io, int error, std::span<const uint16_t> good) {
  if (error == 0 || error == ENODATA) io.pack->damaged.store(true, std::memory_order_relaxed);
  if (!io.portion) return;
  bool wanted_lost = false, all_wanted = true;
  for (uint32_t i = 0; i < io.part_count; ++i) {
    uint16_t wanted = 0;
    for (const ExtentUse& use : io.portion->uses)
      if (use.frame == io.parts[i].frame) wanted |= use.wanted;
    const uint16_t blocks = blocks_of(io.parts[i]);
    wanted_lost |= (wanted & blocks & ~good[i]) != 0;
    all_wanted &= io.parts[i].frame != kNoFrame && (blocks & ~wanted) == 0;
  }
  if (error != 0 && !all_wanted) {
    io.portion->singly = true;
  } else if (wanted_lost) {
    io.run->fault = error == 0 || error == ENODATA ? Fault::kDataLoss : Fault::kUnavailable;
  }
}

void GatherPath::flush_landings() {
  if (landings_.empty()) return;
  frames_.landed(landings_);
  landings_.clear();
}

// Delivers what one step may, from where the last one stopped; every extent of the portion is ready.
void GatherPath::deliver_some(RunTask& t, Portion& p, uint64_t& cost) {
  const Binding& binding = t.binding();
  const uint32_t bytes = binding.record_bytes();
  const uint64_t lane = binding.window(t.layer, t.run.lane).offset, now = now_ns();
  t.spent.turn(Wait::kCopy, now);
  Worker& worker = t.shard->worker;
  PullWindow* const pull = t.op == Op::kGather && t.ring->consumer->device() ? worker.pull : nullptr;
  if (t.ticket->first_copy_ns == 0) t.ticket->first_copy_ns = now;
  t.shard->unfenced = true;
  const uint32_t limit = reach(t);
  uint32_t found = 0, pulled = 0, of_use = p.copied;
  for (size_t next = p.next_use; found + pulled < limit && next < p.uses.size();) {
    ExtentUse& use = p.uses[next];
    if (pull && of_use == 0 && worker.arena->has(use.frame)) use.kept = t.ring->pulled.keep(t.ticket->seq, use.frame);
    const uint32_t record = use.first + of_use;
    const uint64_t place = lane + uint64_t{p.places[record]} * bytes;
    if (use.kept) {
      const uint64_t line = worker.arena->offset(use.frame) + p.offsets[record];
      pull->name(&place, &line, 1);
      ++pulled;
    } else {
      from_[found] = frames_.address(use.frame) + p.offsets[record];
      to_[found++] = place;
    }
    if (++of_use == use.count) ++next, of_use = 0;
  }
  const uint32_t copied = deliver(t, found, pulled > 0 ? UINT64_MAX : now + kStepNs);
  p.advance(copied + pulled);
  count(t, copied, pulled, cost);
}

}  // namespace headgate
