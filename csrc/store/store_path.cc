#include "store/store_path.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/pack_file.h"
#include "store/tier/policy.h"

namespace headgate {
namespace {

constexpr uint32_t kBuffers = 8;
constexpr uint32_t kBufferBlocks = 32;
constexpr uint64_t kBufferBytes = uint64_t{kBufferBlocks} * kBlockBytes;
static_assert(kBufferBlocks >= map_blocks(kPackTokensMax));

uint64_t map_bytes(const PackHeader& h) { return h.tokens * sizeof(uint16_t); }

uint32_t map_blocks_of(const RunTask& t) { return t.run.kind == 0 ? map_blocks(t.upload->header().tokens) : 0; }

// Copies the map from behind the records and checks the copy: the worker can still write what is staged.
Fault pack_map(const RunTask& t, uint8_t* to) {
  const PackHeader& h = t.upload->header();
  const uint64_t records = uint64_t{h.tokens} * h.kinds[0].record_bytes, bytes = map_bytes(h);
  std::memcpy(to, t.shard->worker.staging.data() + t.run.arg + records, bytes);
  std::memset(to + bytes, 0, map_blocks(h.tokens) * kBlockBytes - bytes);
  bool sound = is_permutation(reinterpret_cast<const uint16_t*>(to), h.tokens);
  return sound ? Fault::kNone : Fault::kInvalidArgument;
}

// What the worker says that blocks [first, end) of the records are worth, which it may change at any time: the most.
uint8_t grade(const RunTask& t, uint32_t first, uint32_t end) {
  const PackHeader& h = t.upload->header();
  const uint64_t records = uint64_t{h.tokens} * h.kinds[t.run.kind].record_bytes;
  const uint8_t* grades = t.shard->worker.staging.data() + t.run.arg + records + (t.run.kind == 0 ? map_bytes(h) : 0);
  uint8_t most = 0;
  for (uint32_t block = first; block < end; ++block) most = std::max(most, grades[block]);
  static_assert(kGradeMax <= Policy::kWeightMax);
  return std::min(most, kGradeMax);
}

// Packs dense records into `count` blocks that no record straddles, from block `first` of the segment.
Fault pack_records(const RunTask& t, uint8_t* to, uint32_t first, uint32_t count) {
  const uint32_t tokens = t.upload->header().tokens;
  const uint32_t record_bytes = t.upload->header().kinds[t.run.kind].record_bytes;
  const uint32_t per_block = records_per_block(record_bytes);
  const uint8_t* staged = t.shard->worker.staging.data() + t.run.arg;
  for (uint32_t b = 0; b < count; ++b, to += kBlockBytes) {
    uint32_t record = (first + b) * per_block;
    uint32_t bytes = std::min(per_block, tokens - record) * record_bytes;
    std::memcpy(to, staged + uint64_t{record} * record_bytes, bytes);
    std::memset(to + bytes, 0, kBlockBytes - bytes);
    // Such a block could never be told from a write that was lost.
    if (all_zero(to, kBlockBytes)) return Fault::kInvalidArgument;
  }
  return Fault::kNone;
}

}  // namespace

StorePath::StorePath(Frames& frames, IoEngine& io, Counters& counters)
    : frames_(frames), io_(io), counters_(counters), buffers_(kBuffers * kBufferBytes) {
  for (uint32_t i = 0; i < kBuffers; ++i) free_.push_back(i);
}

Fault StorePath::begin(RunTask& t) {
  auto owned = t.shard->uploads.find(t.run.slot);
  if (owned == t.shard->uploads.end()) return Fault::kInvalidArgument;
  const PackHeader& h = owned->second->header();
  if (t.run.kind >= h.kind_count || t.layer >= h.layers || t.run.lane >= h.kinds[t.run.kind].lanes)
    return Fault::kInvalidArgument;
  const KindHeader& kind = h.kinds[t.run.kind];
  uint64_t records = uint64_t{h.tokens} * kind.record_bytes;
  uint64_t map = t.run.kind == 0 ? map_bytes(h) : 0;
  uint64_t staged = t.shard->worker.staging.bytes();
  const uint32_t grades = t.run.pair_count;
  if (grades != 0 && grades != kind.segment_bytes / kBlockBytes) return Fault::kInvalidArgument;
  if (t.run.arg > staged || records + map + grades > staged - t.run.arg) return Fault::kInvalidArgument;
  Fault refused = owned->second->begin_segment(t.run.kind, t.layer, t.run.lane);
  if (refused != Fault::kNone) return refused;
  t.upload = owned->second;
  t.next_block = 0;
  t.blocks = map_blocks_of(t) + uint32_t(kind.segment_bytes / kBlockBytes);
  return Fault::kNone;
}

Need StorePath::step(RunTask& t) {
  if (!all_written(t)) return Need::kTransfer;
  end_segment(t, t.fault == Fault::kNone);
  return Need::kNothing;
}

void StorePath::drop(RunTask& t) {
  if (t.upload) end_segment(t, false);
}

uint64_t StorePath::write(RunTask& t) {
  const PackHeader& h = t.upload->header();
  const KindHeader& kind = h.kinds[t.run.kind];
  const uint32_t segment = t.layer * kind.lanes + t.run.lane;
  const uint32_t map = map_blocks_of(t);
  const bool is_map = t.next_block < map;
  const uint32_t from = is_map ? 0 : t.next_block - map;  // blocks
  const uint32_t count = is_map ? map : std::min(kBufferBlocks, t.blocks - t.next_block);

  uint32_t buffer = free_.back();
  uint8_t* to = buffers_.data() + buffer * kBufferBytes;
  t.fault = is_map ? pack_map(t, to) : pack_records(t, to, from, count);
  const uint32_t bytes = count * kBlockBytes;
  if (t.fault != Fault::kNone) return bytes;

  Io io{};
  io.site = is_map ? Site::kUploadMap : Site::kUploadSegment;
  io.offset = is_map ? h.map_off + uint64_t{segment} * map * kBlockBytes
                     : kind.data_off + segment * kind.segment_bytes + uint64_t{from} * kBlockBytes;
  for (uint32_t b = 0; b < count; ++b) {
    const uint64_t number = io.offset / kBlockBytes + b;
    t.upload->set_crc(uint32_t(number - 1), block_crc(h.build, number, to + uint64_t{b} * kBlockBytes));
  }
  free_.pop_back();
  io.fd = t.upload->fd();
  io.write = true;
  io.bytes = bytes;
  io.pieces[io.piece_count++] = {to, bytes};
  io.run = &t;
  io.bulk = true;
  io.write_buffer = buffer;
  io_.collect(io);
  ++t.io_in_flight;
  t.next_block += count;
  return bytes;
}

void StorePath::landed(const Io& io, int error) {
  free_.push_back(io.write_buffer);
  --io.run->io_in_flight;
  if (error != 0) {
    io.run->fault = error == ENOSPC || error == EDQUOT ? Fault::kResourceExhausted : Fault::kUnavailable;
    return;
  }
  add(counters_.nvme_write_bytes, io.bytes);
  if (io.site != Site::kUploadSegment) return;
  add(counters_.store_bytes, io.bytes);
  if (!io.run->ended && io.run->run.pair_count > 0) seed(*io.run, io);
}

// Puts blocks that have just been written into DRAM, out of the buffer: what the grades are worth, if they are.
void StorePath::seed(const RunTask& t, const Io& io) {
  PackFile* pack = t.upload->seeds.get();
  if (!pack || pack->closed) return;
  const uint8_t* from = buffers_.data() + io.write_buffer * kBufferBytes;
  const uint32_t per_extent = frames_.extent_blocks();
  const uint32_t segment = pack->segment_block(t.run.kind, t.layer, t.run.lane);
  const uint32_t segment_end = segment + t.run.pair_count;
  const uint32_t first = uint32_t(io.offset / kBlockBytes) - 1, end = first + io.bytes / kBlockBytes;
  Landing landings[kBufferBlocks + 1];
  uint32_t count = 0;
  uint8_t refused = 0;  // a frame was looked for at this weight, which takes hundreds of looks, and none found
  for (uint32_t extent = first / per_extent; extent * per_extent < end; ++extent) {
    const uint32_t begin = extent * per_extent;
    const uint8_t weight =
        grade(t, std::max(begin, segment) - segment, std::min(begin + per_extent, segment_end) - segment);
    if (weight <= refused) continue;
    const uint32_t low = std::max(begin, first), high = std::min(begin + per_extent, end);
    const uint16_t blocks = uint16_t((1u << (high - begin)) - (1u << (low - begin)));
    ExtentUse use{pack, extent, kNoFrame, 0, 0, blocks, 0, false, false};
    const Frames::Ahead result = frames_.acquire_seed(use, weight);
    if (result == Frames::Ahead::kFull) refused = weight;
    if (result != Frames::Ahead::kRead) continue;
    std::memcpy(frames_.address(use.frame) + uint64_t{low - begin} * kBlockBytes,
                from + uint64_t{low - first} * kBlockBytes, uint64_t{high - low} * kBlockBytes);
    landings[count++] = {use.frame, use.to_read, 0, true};
    add(counters_.seed_bytes, uint64_t{high - low} * kBlockBytes);
  }
  if (count > 0) frames_.landed({landings, count});
}

void StorePath::end_segment(RunTask& t, bool written) {
  t.upload->end_segment(t.run.kind, t.layer, t.run.lane, written);
  t.upload.reset();
}

}  // namespace headgate
