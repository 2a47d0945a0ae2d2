#include "store/direct_io.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace headgate {
namespace {
constexpr uint64_t kChunkBytes = 1 << 20;  // longer O_DIRECT transfers gain nothing and may be cut
}

BlockBuffer::BlockBuffer(uint64_t bytes)
    : bytes_(bytes), memory_(static_cast<uint8_t*>(std::aligned_alloc(kBlockBytes, bytes))) {
  if (!memory_) throw std::bad_alloc();
  std::memset(memory_.get(), 0, bytes);
}

Fd open_direct(const std::string& path, int flags) {
  Fd fd(::open(path.c_str(), flags | O_DIRECT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (fd.get() >= 0) return fd;
  if (errno == ELOOP) throw data_loss(path + " is a symbolic link");
  if (errno == EINVAL)
    throw failed_precondition(path + ": this file system has no O_DIRECT; set data_dir to a directory on ext4 or xfs");
  throw system_error(path, errno);
}

void read_direct(int fd, uint8_t* to, uint64_t bytes, uint64_t offset, const std::string& path) {
  while (bytes > 0) {
    ssize_t n = pread(fd, to, std::min(bytes, kChunkBytes), off_t(offset));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) throw unavailable(path + ": read: " + std::strerror(errno));
    n -= n % kBlockBytes;
    if (n == 0) throw data_loss(path + ": ends at byte " + std::to_string(offset));
    to += n, offset += uint64_t(n), bytes -= uint64_t(n);
  }
}

void write_direct(int fd, const uint8_t* from, uint64_t bytes, uint64_t offset, const std::string& path) {
  while (bytes > 0) {
    ssize_t n = pwrite(fd, from, std::min(bytes, kChunkBytes), off_t(offset));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) throw system_error(path + ": write", errno);
    n -= n % kBlockBytes;
    if (n == 0) throw unavailable(path + ": write made no progress");
    from += n, offset += uint64_t(n), bytes -= uint64_t(n);
  }
}

}  // namespace headgate
