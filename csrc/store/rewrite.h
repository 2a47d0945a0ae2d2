// A pack's segments, moved into an upload of the same pack with their records in another order.
#pragma once

#include <cstdint>
#include <span>

#include "store/pack_file.h"
#include "store/upload.h"

namespace headgate {

// `order`: u16[tokens], which record of the source comes where; the map follows. Of a kind other than 0, which has no
// map, nothing is reordered and it is empty. Every block is checked as it is read: DATA_LOSS. INVALID_ARGUMENT: the
// upload is of another pack, the order no permutation. FAILED_PRECONDITION: a block would be all zero, which no pack
// may have. RESOURCE_EXHAUSTED, UNAVAILABLE: the disk. After an error the segment is missing as before.
void rewrite_segment(const PackFile& from, Upload& to, uint32_t kind, uint32_t layer, uint32_t lane,
                     std::span<const uint16_t> order);

}  // namespace headgate
