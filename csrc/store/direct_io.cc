#include "store/direct_io.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

namespace headgate {
namespace {
constexpr uint64_t kChunkBytes = 1 << 20;  // longer O_DIRECT transfers gain nothing and may be cut

// Moves whole blocks with transfer(done, bytes) until all are moved; returns 0 or an errno.
// ENODATA: the file is too short.
template <typename Transfer>
int move_blocks(uint64_t bytes, Transfer transfer) {
  uint32_t retries = 0;
  for (uint64_t done = 0; done < bytes;) {
    ssize_t n = transfer(done, std::min(bytes - done, kChunkBytes));
    if (n == 0) return ENODATA;
    if (n >= kBlockBytes) {
      done += uint64_t(n) / kBlockBytes * kBlockBytes;
    } else if (n < 0 && errno != EINTR && errno != EAGAIN) {
      return errno;
    } else if (++retries > kRetriesMax) {
      return n < 0 ? errno : ENODATA;
    }
  }
  return 0;
}

}  // namespace

BlockBuffer::BlockBuffer(uint64_t bytes) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw system_error("a buffer of " + std::to_string(bytes) + " B", errno);
  data_ = static_cast<uint8_t*>(at);
}

BlockBuffer::~BlockBuffer() { munmap(data_, bytes_); }

uint8_t* HugePage::aligned() const {
  const uint64_t at = reinterpret_cast<uintptr_t>(around_.data());
  uint8_t* data = around_.data() + (kBytes - at % kBytes) % kBytes;
  madvise(data, kBytes, MADV_HUGEPAGE);  // without it is slower
  return data;
}

Fd open_direct(Site site, const std::string& path, int flags) {
  Fd fd(disk::open(site, path.c_str(), flags | O_DIRECT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (fd.get() >= 0) return fd;
  if (errno == ELOOP) throw data_loss(path + " is a symbolic link");
  if (errno == EINVAL)
    throw failed_precondition(path + ": this file system has no O_DIRECT; set data_dir to a directory on ext4 or xfs");
  throw system_error(path, errno);
}

void read_direct(Site site, int fd, uint8_t* to, uint64_t bytes, uint64_t offset, const std::string& path) {
  int error =
      move_blocks(bytes, [&](uint64_t done, uint64_t n) { return disk::pread(site, fd, to + done, n, offset + done); });
  if (error == ENODATA) throw data_loss(path + ": ends before byte " + std::to_string(offset + bytes));
  if (error != 0) throw system_error(path + ": read", error);
}

void write_direct(Site site, int fd, const uint8_t* from, uint64_t bytes, uint64_t offset, const std::string& path) {
  int error = move_blocks(
      bytes, [&](uint64_t done, uint64_t n) { return disk::pwrite(site, fd, from + done, n, offset + done); });
  if (error == ENODATA) throw unavailable(path + ": write made no progress");
  if (error != 0) throw system_error(path + ": write", error);
}

}  // namespace headgate
