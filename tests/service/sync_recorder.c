// Preloaded into a daemon under test: writes every write and sync of a file to $SYNC_LOG, in order.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static void record(const char* call, int fd) {
  char link[64], path[512], line[600];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  const char* log = getenv("SYNC_LOG");
  if (length < 0 || log == NULL || path[0] != '/') return;
  path[length] = 0;
  int size = snprintf(line, sizeof line, "%s %s\n", call, path);
  int out = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (out < 0) return;
  // The real write, not ours: this file is no part of the record.
  ssize_t (*real)(int, const void*, size_t) = (ssize_t (*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
  if (real(out, line, (size_t)size) < 0) abort();
  close(out);
}

#define SYNC(name)                                          \
  int name(int fd) {                                        \
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, #name); \
    int result = real(fd);                                  \
    if (result == 0) record("sync", fd);                    \
    return result;                                          \
  }
SYNC(fsync)
SYNC(fdatasync)

#define WRITE(name)                                                                                        \
  ssize_t name(int fd, const void* data, size_t size, off_t offset) {                                      \
    ssize_t (*real)(int, const void*, size_t, off_t) =                                                     \
        (ssize_t (*)(int, const void*, size_t, off_t))dlsym(RTLD_NEXT, #name);                             \
    record("write", fd);                                                                                   \
    return real(fd, data, size, offset);                                                                   \
  }
WRITE(pwrite)
WRITE(pwrite64)
