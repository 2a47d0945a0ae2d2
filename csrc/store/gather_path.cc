#include "store/gather_path.h"

#include <algorithm>
#include <bit>

#include "core/futex.h"
#include "store/gather.h"

namespace headgate {
namespace {

// A portion bounds what one run pins and how long it keeps the thread: about a millisecond of copying.
constexpr uint32_t kPortionExtents = 512;
constexpr uint32_t kPortionRecords = 16384;

// A smaller run is still in a cache when attention reads it.
constexpr uint64_t kCachedBytes = 1 << 20;

bool all_copied(const RunTask& t) {
  return std::all_of(t.uses.begin(), t.uses.end(), [](const ExtentUse& use) { return use.copied; });
}

}  // namespace

Fault GatherPath::validate(const Run& run, Op op, uint16_t layer, const Binding& binding, const TakenTicket& ticket) {
  if (run.kind != 0 || !binding.has_lane(layer, run.lane)) return Fault::kInvalidArgument;
  uint64_t places = binding.window(layer, run.lane).places;
  if (op == Op::kRange) {
    bool inside = uint64_t{run.first_pair} + run.pair_count <= binding.records() && run.arg <= places &&
                  run.pair_count <= places - run.arg && run.arg <= UINT32_MAX - run.pair_count;
    return inside ? Fault::kNone : Fault::kInvalidArgument;
  }
  uint64_t end = uint64_t{run.first_pair} + run.pair_count;
  if (end > ticket.pairs.size()) return Fault::kInvalidArgument;
  uint32_t record_max = 0, place_max = 0;
  for (uint64_t i = run.first_pair; i < end; ++i) {
    record_max = std::max(record_max, ticket.pairs[i].record);
    place_max = std::max(place_max, ticket.pairs[i].place);
  }
  bool inside = run.pair_count == 0 || (record_max < binding.records() && place_max < places);
  return inside ? Fault::kNone : Fault::kInvalidArgument;
}

bool GatherPath::step(RunTask& t) {
  if (t.uses.empty() && !begin_portion(t)) return t.cursor == t.total;
  if (t.io_in_flight > 0) return false;
  if (t.fault == Fault::kNone && !all_copied(t)) {
    frames_.refresh(t.uses);
    for (const ExtentUse& use : t.uses)
      if (!use.ready) t.io_in_flight += read(use, &t);
    copy_ready(t);
    if (!all_copied(t)) return false;  // read by another run, or failed there and now read by this one
  }
  release(t);
  t.cursor = t.portion_end;
  return t.fault != Fault::kNone || t.cursor == t.total;
}

bool GatherPath::drain(RunTask& t) {
  if (t.io_in_flight > 0) return false;
  release(t);
  return true;
}

// Plans and pins the next portion; false if there is nothing left or no frame is free.
bool GatherPath::begin_portion(RunTask& t) {
  if (t.cursor == t.total) return false;
  plan_portion(t);
  size_t pinned = frames_.acquire(t.uses);
  if (pinned < t.uses.size()) t.portion_end = t.cursor + t.uses[pinned].first;
  t.uses.resize(pinned);
  if (pinned == 0) return false;
  for (const ExtentUse& use : t.uses) t.io_in_flight += read(use, &t);
  copy_ready(t);
  return true;
}

void GatherPath::plan_portion(RunTask& t) {
  const Binding& binding = t.binding();
  const uint32_t record_bytes = binding.record_bytes();
  const uint32_t per_block_count = records_per_block(record_bytes);
  const Divider per_block(per_block_count), per_extent(frames_.extent_blocks());
  const uint32_t end = t.cursor + std::min(t.total - t.cursor, kPortionRecords);
  t.offsets.resize(end - t.cursor);
  RecordOrigin origin{0, 0, 0};
  PackFile* pack = nullptr;
  uint32_t segment_block = 0;
  uint32_t i = t.cursor;
  for (; i < end; ++i) {
    uint32_t record = t.pair(i).record;
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
    if (t.uses.empty() || t.uses.back().extent != extent || t.uses.back().pack != pack) {
      if (t.uses.size() == kPortionExtents) break;
      t.uses.push_back({pack, extent, kNoFrame, i - t.cursor, 0, 0, 0, false, false});
    }
    t.uses.back().wanted |= uint16_t(1u << block_in_extent);
    ++t.uses.back().count;
    uint32_t offset = (index - block_in_segment * per_block_count) * record_bytes;
    t.offsets[i - t.cursor] = uint16_t(block_in_extent * kBlockBytes + offset);
  }
  t.portion_end = i;
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
    io.pack = use.pack;
    io.frame = use.frame;
    io.extent = use.extent;
    io.first_block = first;
    io_.collect(io, run == nullptr);
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
  if (good != all && (error == 0 || error == ENODATA)) io.pack->damaged.store(true, std::memory_order_relaxed);
  landings_.push_back({io.frame, good, uint16_t(all & ~good), io.run == nullptr});
  if (!io.run) return;
  --io.run->io_in_flight;
  // Only a block that this run wants may fail it; the rest of the extent was read along.
  bool wanted = false;
  for (const ExtentUse& use : io.run->uses) wanted |= use.frame == io.frame && (use.wanted & all & ~good) != 0;
  if (wanted) io.run->fault = error == 0 || error == ENODATA ? Fault::kDataLoss : Fault::kUnavailable;
}

void GatherPath::flush_landings() {
  if (landings_.empty()) return;
  frames_.landed(landings_);
  landings_.clear();
}

// Copies the records of every extent that became ready.
void GatherPath::copy_ready(RunTask& t) {
  const Binding& binding = t.binding();
  const uint32_t bytes = binding.record_bytes();
  uint8_t* lane = t.worker->window.base() + binding.window(t.layer, t.run.lane).offset;
  from_.resize(kPortionRecords);
  to_.resize(kPortionRecords);
  size_t count = 0;
  for (ExtentUse& use : t.uses) {
    if (!use.ready || use.copied) continue;
    const uint8_t* frame = frames_.address(use.frame);
    for (uint32_t r = use.first; r < use.first + use.count; ++r, ++count) {
      from_[count] = frame + t.offsets[r];
      to_[count] = lane + uint64_t{t.pair(t.cursor + r).place} * bytes;
    }
    use.copied = true;
  }
  if (count == 0) return;
  if (t.ticket->first_copy_ns == 0) t.ticket->first_copy_ns = now_ns();
  copy_records(from_.data(), to_.data(), count, bytes, t.total * uint64_t{bytes} >= kCachedBytes);
  add(counters_.records_copied, count);
  add(counters_.bytes_copied, count * uint64_t{bytes});
}

void GatherPath::release(RunTask& t) {
  if (!t.uses.empty()) frames_.release(t.uses);
  t.uses.clear();
}

}  // namespace headgate
