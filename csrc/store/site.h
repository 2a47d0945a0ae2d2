// The places that make a system call on a pack file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace headgate {

enum class Site : uint8_t {
  kUploadOpen,
  kUploadAllocate,
  kUploadExtend,
  kUploadMap,
  kUploadSegment,
  kUploadTail,
  kUploadTailSync,
  kUploadHeader,
  kUploadHeaderSync,
  kUploadUnlink,
  kPackOpen,
  kPackStat,
  kPackHeader,
  kPackCrcs,
  kPackMap,
  kPackVerify,
  kGather,
  kReadAhead,
  kSubmit,
  kCount
};
inline constexpr const char* kSiteNames[] = {
    "upload.open",      "upload.allocate", "upload.extend",      "upload.map",    "upload.segment", "upload.tail",
    "upload.tail_sync", "upload.header",   "upload.header_sync", "upload.unlink", "pack.open",      "pack.stat",
    "pack.header",      "pack.crcs",       "pack.map",           "pack.verify",   "gather",         "read_ahead",
    "submit",
};
static_assert(std::size(kSiteNames) == size_t(Site::kCount));

// A request of a ring, as far as the disk sees it.
struct BlockTransfer {
  int fd;
  bool write;
  uint8_t* buffer;
  uint32_t bytes;
  uint64_t offset;
};

}  // namespace headgate
