// Where the records of one lane lie in their packs.
#pragma once

#include <cstdint>

#include "core/pack.h"
#include "store/worker.h"

namespace headgate {

// x / d for x < 2^28 and d <= 64 by one multiplication.
class Divider {
 public:
  explicit Divider(uint32_t d) : reciprocal_((uint64_t{1} << 34) / d + 1) {}
  uint32_t operator()(uint32_t x) const { return uint32_t(x * reciprocal_ >> 34); }

 private:
  uint64_t reciprocal_;
};

struct RecordPlace {
  PackFile* pack;
  uint32_t extent;
  uint32_t block;   // of the extent
  uint32_t offset;  // in the extent, bytes
};

// Asked for records of the binding, mostly in ascending order.
class RecordLocator {
 public:
  RecordLocator(const Binding& binding, uint32_t layer, uint32_t lane, uint32_t extent_blocks)
      : binding_(binding),
        layer_(layer),
        lane_(lane),
        record_bytes_(binding.record_bytes()),
        extent_blocks_(extent_blocks),
        per_block_count_(records_per_block(record_bytes_)),
        per_block_(per_block_count_),
        per_extent_(extent_blocks) {}

  RecordPlace operator()(uint32_t record) {
    if (record < origin_.first || record >= origin_.end) {
      origin_ = binding_.origin(record);
      pack_ = &binding_.pack(origin_.pack);
      segment_block_ = pack_->segment_block(0, layer_, lane_);
    }
    const uint32_t index = record - origin_.first;
    const uint32_t block_in_segment = per_block_(index);
    const uint32_t block = segment_block_ + block_in_segment;
    const uint32_t extent = per_extent_(block);
    const uint32_t block_in_extent = block - extent * extent_blocks_;
    const uint32_t offset = (index - block_in_segment * per_block_count_) * record_bytes_;
    return {pack_, extent, block_in_extent, uint32_t(block_in_extent * kBlockBytes) + offset};
  }

 private:
  const Binding& binding_;
  const uint32_t layer_, lane_, record_bytes_, extent_blocks_, per_block_count_;
  const Divider per_block_, per_extent_;
  RecordOrigin origin_{0, 0, 0};
  PackFile* pack_ = nullptr;
  uint32_t segment_block_ = 0;
};

}  // namespace headgate
