// The calls of libc that the crash model stands in for, in a process that preloads it; and how a test begins it.
#undef _FORTIFY_SOURCE  // under it headers define some of these calls themselves

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>

#include "shim/crash_disk.h"
#include "shim/crash_model.h"

namespace headgate::shim {
namespace {

std::atomic<bool> begun{false};
std::mutex mutex;
CrashDisk* disk;
thread_local bool inside = false;

// The model, for one thread at a time; none in calls that it makes itself.
class Model {
 public:
  Model() {
    if (!begun || inside) return;
    mutex.lock();
    inside = held_ = true;
  }
  ~Model() { release(); }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  void release() {
    if (!held_) return;
    int error = errno;
    inside = held_ = false;
    mutex.unlock();
    errno = error;
  }
  explicit operator bool() const { return held_; }
  CrashDisk* operator->() const { return disk; }

 private:
  bool held_ = false;
};

bool exists(const char* path) {
  struct stat info;
  return lstat(path, &info) == 0;
}

std::string directory_of(int fd) {
  char path[4096];
  std::string link = "/proc/self/fd/" + std::to_string(fd);
  ssize_t bytes = readlink(link.c_str(), path, sizeof path);
  return {path, size_t(bytes > 0 ? bytes : 0)};
}

bool is_directory(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
}

int open_at(int at, const char* path, int flags, mode_t mode) {
  auto plain = [&] { return int(syscall(SYS_openat, at, path, flags, mode)); };
  Model model;
  if (!model || !model->covers(path) || (flags & O_TMPFILE) == O_TMPFILE) return model.release(), plain();
  const bool held = exists(path);
  flags &= ~O_DIRECT;  // what is read and written past the page cache is no other to the model, and quicker with it
  if (held && (flags & O_TRUNC)) {
    int fd = int(syscall(SYS_openat, at, path, O_RDWR | O_CLOEXEC, 0));
    if (CrashDisk::File* file = fd < 0 ? nullptr : (model->opened(fd, path, false), model->file_of(fd)))
      model->keep_tail(fd, *file, 0);
    if (fd >= 0) close(fd);
  }
  int fd = plain();
  if (fd < 0) return fd;
  model->opened(fd, path, !held);
  if (!held) model->step();
  return fd;
}

template <typename Plain>
ssize_t read_from(int fd, off64_t offset, size_t bytes, Plain plain) {
  Model model;
  CrashDisk::File* file = model ? model->file_of(fd) : nullptr;
  if (!file) return model.release(), plain(bytes);
  if (offset < 0) offset = lseek(fd, 0, SEEK_CUR);
  uint64_t most = model->readable(*file, uint64_t(offset), bytes);
  if (most == 0 && bytes > 0) return errno = EIO, -1;
  return plain(model->shortened(*file, uint64_t(offset), most));
}

template <typename Plain>
ssize_t write_to(int fd, off64_t offset, size_t bytes, Plain plain) {
  Model model;
  CrashDisk::File* file = model ? model->file_of(fd) : nullptr;
  if (!file) return model.release(), plain(bytes);
  if (offset < 0) offset = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  bytes = model->shortened(*file, uint64_t(offset), bytes);
  if (!model->writable(*file, uint64_t(offset), bytes)) return errno = EIO, -1;
  model->keep(fd, *file, uint64_t(offset), bytes);
  ssize_t written = plain(bytes);
  if (written <= 0) return written;
  model->mend(*file, uint64_t(offset), uint64_t(written));
  model->step();
  return written;
}

template <typename Plain>
int sync_of(int fd, Plain plain) {
  Model model;
  CrashDisk::File* file = model ? model->file_of(fd) : nullptr;
  std::string directory = model && is_directory(fd) ? directory_of(fd) : "";
  if (!file && !(model && model->covers_directory(directory))) return model.release(), plain();
  model->step();  // before it has done anything
  file ? model->synced(fd, *file) : model->synced_directory(directory);
  return 0;
}

int cut(int fd, off64_t bytes) {
  Model model;
  CrashDisk::File* file = model ? model->file_of(fd) : nullptr;
  if (file) model->keep_tail(fd, *file, uint64_t(bytes));
  int result = int(syscall(SYS_ftruncate, fd, bytes));
  if (file && result == 0) model->step();
  return result;
}

int unlink_at(int at, const char* path, int flags) {
  Model model;
  bool ours = model && !(flags & AT_REMOVEDIR) && model->covers(path);
  std::string aside = ours ? model->set_aside(path) : "";
  int result = int(syscall(SYS_unlinkat, at, path, flags));
  if (result != 0 || aside.empty()) return result;
  model->unlinked(path, std::move(aside));
  model->step();
  return 0;
}

int rename_at(int from_at, const char* from, int to_at, const char* to) {
  Model model;
  bool ours = model && model->covers(to);
  std::string aside = ours ? model->set_aside(to) : "";
  int result = int(syscall(SYS_renameat2, from_at, from, to_at, to, 0));
  if (result != 0 || !ours || exists(from)) return result;  // two names of one file stay as they are
  model->renamed(from, to, std::move(aside));
  model->step();
  return 0;
}

int link_at(int from_at, const char* from, int to_at, const char* to, int flags) {
  Model model;
  int result = int(syscall(SYS_linkat, from_at, from, to_at, to, flags));
  if (result != 0 || !model || !model->covers(to)) return result;
  model->linked(to);
  model->step();
  return 0;
}

int make_directory_at(int at, const char* path, mode_t mode) {
  Model model;
  int result = int(syscall(SYS_mkdirat, at, path, mode));
  if (result != 0 || !model || !model->covers(path)) return result;
  model->made_directory(path);
  model->step();
  return 0;
}

}  // namespace
}  // namespace headgate::shim

using namespace headgate::shim;

extern "C" {

// From here on, and in this process alone. `unreadable` blocks of an earlier crash are read from `aside`.
void crash_model_begin(const char* root, const char* aside, uint64_t seed, uint64_t crash_at, uint32_t faults) {
  inside = true;
  disk = new CrashDisk({root, aside, seed, crash_at, faults});
  inside = false;
  begun = true;
}
void crash_model_crash() {
  Model model;
  model->crash();
}
void crash_model_crash_within(uint64_t steps) {
  Model model;
  model->crash_within(steps);
}
Turn crash_model_turn(int fd, uint64_t offset) {
  Model model;
  CrashDisk::File* file = model ? model->file_of(fd) : nullptr;
  if (!file) return Turn::kKernel;
  if (!model->shuffles()) return Turn::kAtCompletion;
  Draw draw = model->draw(*file, offset);
  const Turn turns[] = {Turn::kAtSubmission, Turn::kAtCompletion, Turn::kAtCompletion,
                        Turn::kAgain,        Turn::kAgain,        Turn::kLate};
  return turns[draw.below(std::size(turns))];
}

#define HEADGATE_MODE(flags)                 \
  ({                                         \
    mode_t mode = 0;                         \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
      va_list list;                          \
      va_start(list, flags);                 \
      mode = va_arg(list, mode_t);           \
      va_end(list);                          \
    }                                        \
    mode;                                    \
  })
int open(const char* path, int flags, ...) { return open_at(AT_FDCWD, path, flags, HEADGATE_MODE(flags)); }
int open64(const char* path, int flags, ...) { return open_at(AT_FDCWD, path, flags, HEADGATE_MODE(flags)); }
int openat(int at, const char* path, int flags, ...) { return open_at(at, path, flags, HEADGATE_MODE(flags)); }
int openat64(int at, const char* path, int flags, ...) { return open_at(at, path, flags, HEADGATE_MODE(flags)); }

ssize_t read(int fd, void* to, size_t bytes) {
  return read_from(fd, -1, bytes, [=](size_t n) { return syscall(SYS_read, fd, to, n); });
}
ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  return read_from(fd, offset, bytes, [=](size_t n) { return syscall(SYS_pread64, fd, to, n, offset); });
}
ssize_t pread64(int fd, void* to, size_t bytes, off64_t offset) { return pread(fd, to, bytes, offset); }
ssize_t sendfile(int to, int from, off_t* offset, size_t bytes) noexcept {
  return read_from(from, offset ? *offset : -1, bytes,
                   [=](size_t n) { return syscall(SYS_sendfile, to, from, offset, n); });
}
ssize_t sendfile64(int to, int from, off64_t* offset, size_t bytes) noexcept {
  return sendfile(to, from, offset, bytes);
}

ssize_t write(int fd, const void* from, size_t bytes) {
  return write_to(fd, -1, bytes, [=](size_t n) { return syscall(SYS_write, fd, from, n); });
}
ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  return write_to(fd, offset, bytes, [=](size_t n) { return syscall(SYS_pwrite64, fd, from, n, offset); });
}
ssize_t pwrite64(int fd, const void* from, size_t bytes, off64_t offset) { return pwrite(fd, from, bytes, offset); }

int fsync(int fd) {
  return sync_of(fd, [=] { return int(syscall(SYS_fsync, fd)); });
}
int fdatasync(int fd) {
  return sync_of(fd, [=] { return int(syscall(SYS_fdatasync, fd)); });
}
int ftruncate(int fd, off_t bytes) noexcept { return cut(fd, bytes); }
int ftruncate64(int fd, off64_t bytes) noexcept { return cut(fd, bytes); }

int unlink(const char* path) noexcept { return unlink_at(AT_FDCWD, path, 0); }
int unlinkat(int at, const char* path, int flags) noexcept { return unlink_at(at, path, flags); }
int rename(const char* from, const char* to) noexcept { return rename_at(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_at, const char* from, int to_at, const char* to) noexcept {
  return rename_at(from_at, from, to_at, to);
}
int link(const char* from, const char* to) noexcept { return link_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_at, const char* from, int to_at, const char* to, int flags) noexcept {
  return link_at(from_at, from, to_at, to, flags);
}
int mkdir(const char* path, mode_t mode) noexcept { return make_directory_at(AT_FDCWD, path, mode); }
int mkdirat(int at, const char* path, mode_t mode) noexcept { return make_directory_at(at, path, mode); }

}  // extern "C"
