// Where the records of one lane lie in their packs.
#pragma once

#include <algorithm>
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

// Records of the lane that lie in one extent, from the binding's record `first` on.
struct ExtentRecords {
  PackFile* pack;
  uint32_t extent;
  uint32_t first, count;
  uint32_t block;  // of the extent, where the first one lies

  bool has(uint32_t record) const { return record - first < count; }
};

struct RecordPlace {
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

  // Those in the record's extent.
  ExtentRecords extent_of(uint32_t record) {
    if (record < origin_.first || record >= origin_.end) {
      origin_ = binding_.origin(record);
      pack_ = &binding_.pack(origin_.pack);
      segment_block_ = pack_->segment_block(0, layer_, lane_);
    }
    const uint32_t extent = per_extent_(segment_block_ + per_block_(record - origin_.first));
    const uint32_t block = std::max(extent * extent_blocks_, segment_block_);
    const uint32_t first = origin_.first + (block - segment_block_) * per_block_count_;
    const uint32_t end = origin_.first + ((extent + 1) * extent_blocks_ - segment_block_) * per_block_count_;
    return {pack_, extent, first, std::min(end, origin_.end) - first, block - extent * extent_blocks_};
  }

  // Of one of them.
  RecordPlace place(const ExtentRecords& in, uint32_t record) const {
    const uint32_t index = record - in.first, block = per_block_(index);
    return {in.block + block,
            (in.block + block) * uint32_t(kBlockBytes) + (index - block * per_block_count_) * record_bytes_};
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
