// GDRCopy's library, found at run time: maps memory of a device into the host's address space, through its BAR.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "gpu/cuda_driver.h"

namespace headgate {

// Throws DeviceError. The library itself is not thread-safe.
class GdrLibrary {
 public:
  struct Handle {  // passed by value
    unsigned long h;
  };

  // Loads `library` and opens its kernel module, or what it has in place of one.
  explicit GdrLibrary(const std::string& library);
  GdrLibrary(const GdrLibrary&) = delete;
  GdrLibrary& operator=(const GdrLibrary&) = delete;
  ~GdrLibrary();

  // A handle is mapped once, and unmapped before it is unpinned. Pages have 64 KiB.
  static constexpr uint64_t kPageBytes = 64 << 10;
  Handle pin(cuda::Pointer at, uint64_t bytes);
  void unpin(Handle handle);
  uint8_t* map(Handle handle, uint64_t bytes);
  void unmap(Handle handle, uint8_t* mapping, uint64_t bytes);
  // Reads over the bus: slow, and behind all that this thread has stored and fenced. Any thread, at once.
  void read(Handle handle, void* to, const uint8_t* from, uint64_t bytes) const;

 private:
  const Library library_;
  std::mutex mutex_;
  void* open_ = nullptr;

  int (*close_)(void*);
  int (*pin_)(void*, unsigned long, size_t, uint64_t, uint32_t, Handle*);
  int (*pin_v2_)(void*, unsigned long, size_t, uint32_t, Handle*);  // of newer versions
  int (*unpin_)(void*, Handle);
  int (*map_)(void*, Handle, void**, size_t);
  int (*map_v2_)(void*, Handle, void**, size_t, int);  // of newer versions
  int (*unmap_)(void*, Handle, void*, size_t);
  int (*copy_from_)(Handle, void*, const void*, size_t);
};

}  // namespace headgate
