// The places that make a system call on a pack file.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

namespace headgate {

enum class Site : uint8_t {
  kUploadOpen,
  kUploadAllocate,
  kUploadExtend,
  kUploadMap,
  kUploadSegment,
  kUploadTail,
  kUploadHeader,
  kUploadSync,
  kUploadUnlink,
  kPackOpen,
  kPackStat,
  kPackHeader,
  kPackCrcs,
  kPackMap,
  kPackVerify,
  kPackSegment,
  kGather,
  kReadAhead,
  kProbeOpen,
  kProbeWrite,
  kProbeRead,
  kSubmit,
  kCount
};
inline constexpr const char* kSiteNames[] = {
    "upload.open",   "upload.allocate", "upload.extend", "upload.map",   "upload.segment", "upload.tail",
    "upload.header", "upload.sync",     "upload.unlink", "pack.open",    "pack.stat",      "pack.header",
    "pack.crcs",     "pack.map",        "pack.verify",   "pack.segment", "gather",         "read_ahead",
    "probe.open",    "probe.write",     "probe.read",    "submit",
};
static_assert(std::size(kSiteNames) == size_t(Site::kCount));

// A request of a ring, as far as the disk sees it: `bytes` from `offset` on, to or from pieces of memory in this order.
struct BlockTransfer {
  int fd;
  bool write;
  std::span<const iovec> pieces;
  uint32_t bytes;
  uint64_t offset;
};

}  // namespace headgate
