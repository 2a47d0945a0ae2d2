// What a read costs a busy disk, and what follows for how reads are made.
#pragma once

#include <cstdint>
#include <string>

namespace headgate {

// Microseconds of the disk's time with many requests in flight. The defaults are those of a virtio disk over NVMe.
struct DiskCost {
  double request = 15;
  double kib = 0.4;
  double piece = 2.5;  // of memory beyond the first that a request goes to

  // A second request costs more than reading through so many blocks, and no neighbour waits long for them.
  static constexpr uint32_t kThroughMax = 16;
  uint32_t through_blocks() const;
};

// By reads of an unlinked file in `directory`, of which nothing is left: takes some 30 ms. RESOURCE_EXHAUSTED on a full
// disk, UNAVAILABLE on an I/O error, FAILED_PRECONDITION without O_DIRECT or unlinked files.
DiskCost measure_disk(const std::string& directory);

}  // namespace headgate
