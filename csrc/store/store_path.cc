#include "store/store_path.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/pack_file.h"

namespace headgate {
namespace {

constexpr uint32_t kBuffers = 8;
constexpr uint32_t kBufferBlocks = 32;
constexpr uint64_t kBufferBytes = uint64_t{kBufferBlocks} * kBlockBytes;

}  // namespace

StorePath::StorePath(IoEngine& io, Counters& counters)
    : io_(io), counters_(counters), buffers_(kBuffers * kBufferBytes) {
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
  uint64_t map = t.run.kind == 0 ? h.tokens * sizeof(uint16_t) : 0;
  uint64_t staged = t.shard->worker.staging.bytes();
  if (t.run.arg > staged || records + map > staged - t.run.arg) return Fault::kInvalidArgument;
  Fault refused = owned->second->begin_segment(t.run.kind, t.layer, t.run.lane);
  if (refused != Fault::kNone) return refused;
  t.upload = owned->second;
  t.next_block = 0;
  t.blocks = uint32_t(kind.segment_bytes / kBlockBytes);
  if (map > 0) t.upload->set_map(t.layer, t.run.lane, t.shard->worker.staging.data() + t.run.arg + records);
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

// Packs dense records into blocks that no record straddles.
uint64_t StorePath::write(RunTask& t) {
  const PackHeader& h = t.upload->header();
  const KindHeader& kind = h.kinds[t.run.kind];
  const uint32_t per_block = records_per_block(kind.record_bytes);
  const uint8_t* staged = t.shard->worker.staging.data() + t.run.arg;
  uint64_t segment_off = kind.data_off + (uint64_t{t.layer} * kind.lanes + t.run.lane) * kind.segment_bytes;
  uint32_t first_block = uint32_t(segment_off / kBlockBytes) - 1;

  uint32_t buffer = free_.back();
  uint8_t* to = buffers_.data() + buffer * kBufferBytes;
  uint32_t count = std::min(kBufferBlocks, t.blocks - t.next_block);
  for (uint32_t b = 0; b < count; ++b) {
    uint32_t record = (t.next_block + b) * per_block;
    uint32_t bytes = std::min(per_block, h.tokens - record) * kind.record_bytes;
    uint8_t* block = to + uint64_t{b} * kBlockBytes;
    std::memcpy(block, staged + uint64_t{record} * kind.record_bytes, bytes);
    std::memset(block + bytes, 0, kBlockBytes - bytes);
    // Such a block could never be told from a write that was lost.
    if (all_zero(block, kBlockBytes)) return t.fault = Fault::kInvalidArgument, uint64_t{b + 1} * kBlockBytes;
    uint32_t number = first_block + t.next_block + b;
    t.upload->set_crc(number, block_crc(h.build, uint64_t{number} + 1, block));
  }

  free_.pop_back();
  Io io{};
  io.site = Site::kUploadSegment;
  io.fd = t.upload->fd();
  io.write = true;
  io.buffer = to;
  io.bytes = count * kBlockBytes;
  io.offset = segment_off + uint64_t{t.next_block} * kBlockBytes;
  io.run = &t;
  io.bulk = true;
  io.write_buffer = buffer;
  io_.collect(io);
  ++t.io_in_flight;
  t.next_block += count;
  return io.bytes;
}

void StorePath::landed(const Io& io, int error) {
  free_.push_back(io.write_buffer);
  --io.run->io_in_flight;
  if (error != 0) {
    io.run->fault = error == ENOSPC || error == EDQUOT ? Fault::kResourceExhausted : Fault::kUnavailable;
    return;
  }
  add(counters_.nvme_write_bytes, io.bytes);
  add(counters_.store_bytes, io.bytes);
}

void StorePath::end_segment(RunTask& t, bool written) {
  t.upload->end_segment(t.run.kind, t.layer, t.run.lane, written);
  t.upload.reset();
}

}  // namespace headgate
