// Blocking O_DIRECT I/O of whole blocks, for everything outside the decode path.
#pragma once

#include <cstdint>
#include <string>

#include "core/pack.h"
#include "store/disk.h"
#include "store/mapping.h"

namespace headgate {

// Zeroed memory of whole blocks, aligned to a block. Pages that nobody has touched cost nothing,
// and none stay with the allocator afterwards.
class BlockBuffer {
 public:
  explicit BlockBuffer(uint64_t bytes);  // RESOURCE_EXHAUSTED
  BlockBuffer(const BlockBuffer&) = delete;
  BlockBuffer& operator=(const BlockBuffer&) = delete;
  ~BlockBuffer();
  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  const uint64_t bytes_;
  uint8_t* data_;
};

// A huge page where the kernel has them: a disk takes each physical piece of memory by itself.
class HugePage {
 public:
  static constexpr uint64_t kBytes = 2 << 20;
  uint8_t* data() const { return data_; }

 private:
  BlockBuffer around_{2 * kBytes};
  uint8_t* const data_ = aligned();
  uint8_t* aligned() const;
};

// Opens with O_DIRECT | O_CLOEXEC | flags. FAILED_PRECONDITION where the file system has no O_DIRECT.
Fd open_direct(Site site, const std::string& path, int flags);

// How often a transfer that the kernel wants repeated, or that ends inside a block, is repeated before it has failed.
inline constexpr uint32_t kRetriesMax = 1000;

// Whole blocks; DATA_LOSS at an early end of file, RESOURCE_EXHAUSTED on a full disk, UNAVAILABLE on an I/O error.
void read_direct(Site site, int fd, uint8_t* to, uint64_t bytes, uint64_t offset, const std::string& path);
void write_direct(Site site, int fd, const uint8_t* from, uint64_t bytes, uint64_t offset, const std::string& path);

}  // namespace headgate
