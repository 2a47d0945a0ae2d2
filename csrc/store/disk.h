// The system calls on pack files, each named by its site. In a test build (HEADGATE_IO_SHIM) a shim may fail, cut,
// delay or tear any of them; otherwise these are the plain calls and nothing else.
#pragma once

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>

#include "store/site.h"

#ifdef HEADGATE_IO_SHIM
#include "shim/disk_shim.h"
#else

namespace headgate::shim {

struct Injected {};

template <typename Call>
int call(Site, Call call) {
  return call();
}
template <typename Call>
ssize_t transfer(Site, bool, void*, size_t bytes, Call call) {
  return call(bytes);
}
inline bool prepare(Site, Injected&, io_uring_sqe*, BlockTransfer&) { return false; }
inline int settle(Injected&, const BlockTransfer&, int result) { return result; }

}  // namespace headgate::shim

#endif

namespace headgate::disk {

// As the calls of the same names: -1 and errno.
inline int open(Site site, const char* path, int flags, mode_t mode) {
  return shim::call(site, [=] { return ::open(path, flags, mode); });
}
inline int fallocate(Site site, int fd, uint64_t bytes) {
  return shim::call(site, [=] { return ::fallocate(fd, 0, 0, off_t(bytes)); });
}
inline int ftruncate(Site site, int fd, uint64_t bytes) {
  return shim::call(site, [=] { return ::ftruncate(fd, off_t(bytes)); });
}
inline int fdatasync(Site site, int fd) {
  return shim::call(site, [=] { return ::fdatasync(fd); });
}
inline int fstat(Site site, int fd, struct stat* info) {
  return shim::call(site, [=] { return ::fstat(fd, info); });
}
inline int unlink(Site site, const char* path) {
  return shim::call(site, [=] { return ::unlink(path); });
}
inline ssize_t pread(Site site, int fd, void* to, size_t bytes, uint64_t offset) {
  return shim::transfer(site, false, to, bytes, [=](size_t n) { return ::pread(fd, to, n, off_t(offset)); });
}
inline ssize_t pwrite(Site site, int fd, const void* from, size_t bytes, uint64_t offset) {
  return shim::transfer(site, true, nullptr, bytes, [=](size_t n) { return ::pwrite(fd, from, n, off_t(offset)); });
}
inline int submit(Site site, io_uring* ring) {
  return shim::call(site, [=] { return io_uring_submit(ring); });
}

}  // namespace headgate::disk
