// A file descriptor and a shared mapping that clean up after themselves.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "store/error.h"

namespace headgate {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// `bytes` bytes of an object that another process maps as well. The mapping outlives the caller's descriptor.
class Mapping {
 public:
  Mapping(int fd, uint64_t bytes, int protection, const std::string& what) : bytes_(bytes) {
    struct stat info;
    if (fstat(fd, &info) != 0) throw system_error(what + ": fstat", errno);
    if (bytes == 0 || uint64_t(info.st_size) < bytes)
      throw invalid_argument(what + " has " + std::to_string(info.st_size) + " bytes; " + std::to_string(bytes) +
                             " were declared");
    void* at = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) throw system_error(what + ": mmap", errno);
    data_ = static_cast<uint8_t*>(at);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, bytes_); }
  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  uint64_t bytes_;
};

}  // namespace headgate
