#include "store/rewrite.h"

#include <algorithm>
#include <cstring>

namespace headgate {
namespace {

void require_same(const PackHeader& from, const PackHeader& to) {
  PackHeader same = to;
  std::memcpy(same.build, from.build, sizeof same.build);
  same.record_order = from.record_order;
  same.header_crc = from.header_crc;
  if (std::memcmp(&same, &from, sizeof same) != 0) throw invalid_argument("the upload is not of this pack");
}

void write_blocks(Site site, Upload& to, const BlockBuffer& blocks, uint64_t offset) {
  for (uint64_t b = 0; b < blocks.bytes() / kBlockBytes; ++b) {
    const uint64_t number = offset / kBlockBytes + b;
    const uint8_t* block = blocks.data() + b * kBlockBytes;
    // Such a block could never be told from a write that was lost.
    if (all_zero(block, kBlockBytes)) throw failed_precondition("a block of the rewritten pack would be all zero");
    to.set_crc(uint32_t(number - 1), block_crc(to.header().build, number, block));
  }
  to.write(site, blocks, offset);
}

void rewrite(const PackFile& from, Upload& to, uint32_t kind, uint32_t segment, std::span<const uint16_t> order) {
  const PackHeader& h = to.header();
  const KindHeader& k = h.kinds[kind];
  const uint64_t offset = k.data_off + segment * k.segment_bytes;
  BlockBuffer found(k.segment_bytes);
  from.read_blocks(Site::kPackSegment, found, offset);
  if (kind != 0) return write_blocks(Site::kUploadSegment, to, found, offset);

  const uint32_t per_block = records_per_block(k.record_bytes);
  auto at = [&](uint32_t record) {
    return uint64_t{record / per_block} * kBlockBytes + uint64_t{record % per_block} * k.record_bytes;
  };
  BlockBuffer moved(k.segment_bytes);
  for (uint32_t i = 0; i < h.tokens; ++i)
    std::memcpy(moved.data() + at(i), found.data() + at(order[i]), k.record_bytes);
  write_blocks(Site::kUploadSegment, to, moved, offset);

  const uint64_t map_bytes = uint64_t{map_blocks(h.tokens)} * kBlockBytes, map_off = h.map_off + segment * map_bytes;
  BlockBuffer map(map_bytes), tokens(map_bytes);
  from.read_blocks(Site::kPackMap, map, map_off);
  for (uint32_t i = 0; i < h.tokens; ++i)
    std::memcpy(tokens.data() + i * sizeof(uint16_t), map.data() + order[i] * sizeof(uint16_t), sizeof(uint16_t));
  write_blocks(Site::kUploadMap, to, tokens, map_off);
}

}  // namespace

void rewrite_segment(const PackFile& from, Upload& to, uint32_t kind, uint32_t layer, uint32_t lane,
                     std::span<const uint16_t> order) {
  const PackHeader& h = to.header();
  require_same(from.header(), h);
  if (kind >= h.kind_count || layer >= h.layers || lane >= h.kinds[kind].lanes)
    throw invalid_argument("the pack has no such segment");
  const bool ordered = order.size() == h.tokens && is_permutation(order.data(), h.tokens);
  if (kind == 0 ? !ordered : !order.empty()) throw invalid_argument("order must be a permutation of the records");
  if (to.begin_segment(kind, layer, lane) != Fault::kNone)
    throw failed_precondition("the segment is there already, or the upload is over");
  try {
    rewrite(from, to, kind, layer * h.kinds[kind].lanes + lane, order);
  } catch (...) {
    to.end_segment(kind, layer, lane, false);
    throw;
  }
  to.end_segment(kind, layer, lane, true);
}

}  // namespace headgate
