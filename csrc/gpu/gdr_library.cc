#include "gpu/gdr_library.h"

#include <cerrno>
#include <cstring>

namespace headgate {
namespace {

void check(int error, const char* call) {
  if (error != 0) throw DeviceError(std::string(call) + ": " + std::strerror(error), error == ENOMEM);
}

}  // namespace

GdrLibrary::GdrLibrary(const std::string& library) : library_(library) {
  void* (*open)();
  library_.find(open, "gdr_open");
  library_.find(close_, "gdr_close");
  library_.find(unpin_, "gdr_unpin_buffer");
  library_.find(unmap_, "gdr_unmap");
  library_.find(copy_from_, "gdr_copy_from_mapping");
  if (!library_.find_if_any(pin_v2_, "gdr_pin_buffer_v2")) library_.find(pin_, "gdr_pin_buffer");
  if (!library_.find_if_any(map_v2_, "gdr_map_v2")) library_.find(map_, "gdr_map");
  open_ = open();
  if (!open_) throw DeviceError("gdr_open failed: is the gdrdrv module loaded, and /dev/gdrdrv ours to open?");
}

GdrLibrary::~GdrLibrary() { close_(open_); }

GdrLibrary::Handle GdrLibrary::pin(cuda::Pointer at, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  Handle handle{};
  check(pin_v2_ ? pin_v2_(open_, at, bytes, 0, &handle) : pin_(open_, at, bytes, 0, 0, &handle), "gdr_pin_buffer");
  return handle;
}

void GdrLibrary::unpin(Handle handle) {
  std::lock_guard lock(mutex_);
  unpin_(open_, handle);
}

uint8_t* GdrLibrary::map(Handle handle, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  void* mapping = nullptr;
  check(map_v2_ ? map_v2_(open_, handle, &mapping, bytes, 0) : map_(open_, handle, &mapping, bytes), "gdr_map");
  return static_cast<uint8_t*>(mapping);
}

void GdrLibrary::unmap(Handle handle, uint8_t* mapping, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  unmap_(open_, handle, mapping, bytes);
}

void GdrLibrary::read(Handle handle, void* to, const uint8_t* from, uint64_t bytes) const {
  check(copy_from_(handle, to, from, bytes), "gdr_copy_from_mapping");
}

}  // namespace headgate
