// The pack file: an immutable run of tokens of every layer and lane, in blocks that are checked one by one.
//
//   header (one block) | segments: kind j, layer, lane at data_off[j] + (layer * lanes[j] + lane) * segment_bytes[j]
//                      | maps, record -> token: per segment of kind 0 u16[tokens], zero padded to blocks
//                      | CRC table: u32 per block of segments and maps, then its own CRC, zero padded to blocks
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace headgate {

inline constexpr uint32_t kBlockBytes = 4096;
inline constexpr uint32_t kHashBlockTokens = 256;  // identity: every pack holds a multiple of these
inline constexpr uint32_t kPackTokensMax = 16384;
inline constexpr uint32_t kRecordBytesMax = kBlockBytes;
inline constexpr uint32_t kRecordAlign = 64;
inline constexpr uint32_t kKindsMax = 4;
inline constexpr uint64_t kPackMagic = 0x314b434150474448ull;  // "HDGPACK1"
inline constexpr uint32_t kPackVersion = 3;

// kInt8 and kInt4: each half of a record is quantised by itself (decode_worker/quantised.py).
enum class Dtype : uint32_t { kFloat32 = 1, kBfloat16 = 2, kFloat16 = 3, kUint8 = 4, kInt8 = 5, kInt4 = 6 };

// Bits of one element; 0 for what is none of them.
HEADGATE_HD constexpr uint32_t bits_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return 32;
    case Dtype::kBfloat16:
    case Dtype::kFloat16:
      return 16;
    case Dtype::kUint8:
    case Dtype::kInt8:
      return 8;
    case Dtype::kInt4:
      return 4;
  }
  return 0;
}

// A kind of record; kind 0 is K[d] || V[d] of one token and one KV head (lane).
struct KindHeader {
  uint32_t lanes;
  uint32_t d;
  uint32_t dtype;
  uint32_t record_bytes;
  uint64_t data_off;
  uint64_t segment_bytes;  // whole blocks
};
static_assert(sizeof(KindHeader) == 32);

struct PackHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t header_crc;  // of the header block with this field zero
  uint8_t pack_id[32];
  uint8_t build[16];
  uint8_t parent[32];
  uint8_t fingerprint[32];
  uint32_t layers;
  uint32_t kind_count;
  uint32_t tokens;
  uint32_t extent_blocks;
  uint32_t record_order;  // of a segment's records: the writer's word for it, which the maps spell out
  uint32_t unused;
  KindHeader kinds[kKindsMax];
  uint64_t map_off;
  uint64_t map_bytes;  // of all maps
  uint64_t crc_off;
  uint64_t file_bytes;
};
static_assert(sizeof(PackHeader) == 312 && sizeof(PackHeader) <= kBlockBytes);
static_assert(offsetof(PackHeader, kinds) == 152);

HEADGATE_HD constexpr uint64_t blocks_of(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }
// No record straddles a block.
HEADGATE_HD constexpr uint32_t records_per_block(uint32_t record_bytes) { return kBlockBytes / record_bytes; }

HEADGATE_HD constexpr uint64_t segment_blocks(uint32_t tokens, uint32_t record_bytes) {
  uint32_t per_block = records_per_block(record_bytes);
  return (tokens + per_block - 1) / per_block;
}

// A segment's map has blocks of its own, so that whoever writes the segment writes its map.
HEADGATE_HD constexpr uint32_t map_blocks(uint32_t tokens) { return uint32_t(blocks_of(tokens * sizeof(uint16_t))); }

// Blocks between header and CRC table.
HEADGATE_HD constexpr uint64_t checked_blocks(const PackHeader& h) { return h.crc_off / kBlockBytes - 1; }

// Fills every size and offset from layers, kinds[].{lanes,record_bytes}, tokens. The only place that does.
HEADGATE_HD constexpr void lay_out(PackHeader& h) {
  uint64_t offset = kBlockBytes;
  for (uint32_t j = 0; j < h.kind_count; ++j) {
    KindHeader& kind = h.kinds[j];
    kind.data_off = offset;
    kind.segment_bytes = segment_blocks(h.tokens, kind.record_bytes) * kBlockBytes;
    offset += uint64_t{h.layers} * kind.lanes * kind.segment_bytes;
  }
  h.map_off = offset;
  h.map_bytes = uint64_t{h.layers} * h.kinds[0].lanes * map_blocks(h.tokens) * kBlockBytes;
  h.crc_off = h.map_off + h.map_bytes;
  h.file_bytes = h.crc_off + blocks_of((checked_blocks(h) + 1) * sizeof(uint32_t)) * kBlockBytes;
}

}  // namespace headgate
