// Stands in for libcuda and libgdrapi, in one library. Memory of the device is a memfd. A BAR mapping is memory of its
// own: what is stored there reaches the device at a flush, as late as the bus allows, unless the device reads over it.
// What a stream copies is read and written when somebody asks, for the second time, whether it has ended.
//
// GPU_DOUBLE, words: ordering=N and flush=N are the device's attributes (default 100 and 1); deaf: nothing is ever
// flushed; stuck: no stream ever ends; no_device; no_rdma; no_export; full: no memory is left; bar_full: no room for
// pins; no_module: gdr_open fails; fails=CALL: that call fails. bar_spoils=N: what is stored through the BAR arrives
// wrong from byte N of its memory on; bar_deaf=N: it never arrives; copy_spoils=N: of copies.
// uuid=N: the last byte of the device's.
// GPU_DOUBLE_LOG: a file that gets each call, and a line with FAULT for each one that a real library would not survive.
// GPU_DOUBLE_OLD: built without the names that older libraries lack; GPU_DOUBLE_CUDA_12: with batches as CUDA 12.8 has
// them.
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kOk = 0, kInvalid = 1, kOutOfMemory = 2, kNoDevice = 100, kNotReady = 600, kFailed = 999;
constexpr size_t kGranule = 2 << 20, kPage = 64 << 10;
constexpr uint64_t kUntouched = 0x9D3E5AC1B7F24806;  // of a word of a BAR mapping that nobody has stored to

struct Location {
  int type, id;
};
struct Shape {
  int type, handles;
  Location location;
  void* win32;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct Access {
  Location location;
  int flags;
};
struct Memory {
  int fd;
  size_t bytes;
  bool rdma, released;
  int maps;
};
struct Mapped {
  size_t bytes;
  Memory* memory;
  bool readable;
};
struct Pin {
  uint64_t at;
  size_t bytes;
  uint64_t* bar;
};
struct Copy {
  uint64_t to, from;
  size_t bytes;
};
struct Stream {
  std::vector<Copy> copies;
  bool asked;
};
struct CopyAttributes {
  int source_order;
  Location source, target;
  unsigned flags;
};

std::recursive_mutex mutex;
std::map<unsigned long long, Memory*> memories;
std::map<uint64_t, size_t> reserved;
std::map<uint64_t, Mapped> mapped;
std::map<unsigned long, Pin> pins;
std::map<void*, Stream> streams;
std::map<uint64_t, size_t> hosts;  // pinned memory
std::vector<Copy> fills;           // of zeroes, that have not ended
unsigned long long next_handle = 1;
int contexts = 0, opened = 0;
int the_context, the_gdr;
thread_local bool current = false;

std::string environment(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}
std::string all_words = environment("GPU_DOUBLE"), log_path = environment("GPU_DOUBLE_LOG");

void note(const char* format, ...) {
  if (log_path.empty()) return;
  char line[256];
  va_list values;
  va_start(values, format);
  int length = vsnprintf(line, sizeof line - 1, format, values);
  va_end(values);
  line[length++] = '\n';
  int fd = open(log_path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (write(fd, line, size_t(length)) != length) abort();
  close(fd);
}

std::string word(const char* name) {
  std::string words = " " + all_words + " ";
  size_t at = words.find(std::string(" ") + name);
  if (at == std::string::npos) return "";
  return words.substr(at + 1, words.find(' ', at + 1) - at - 1);
}
int number(const char* name, int otherwise) {
  std::string found = word(name);
  return found.empty() ? otherwise : atoi(found.c_str() + strlen(name));
}
bool fails(const char* call) { return word("fails=") == std::string("fails=") + call; }
int fault(const char* what) {
  note("FAULT %s", what);
  return kInvalid;
}

Mapped* mapping_of(uint64_t at, size_t bytes) {
  auto found = mapped.upper_bound(at);
  if (found == mapped.begin()) return nullptr;
  --found;
  return at + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

void publish(Pin& pin) {
  if (!pin.bar || !word("deaf").empty()) return;
  auto* device = reinterpret_cast<uint64_t*>(pin.at);
  const size_t spoils = size_t(number("bar_spoils=", INT32_MAX)), deaf = size_t(number("bar_deaf=", INT32_MAX));
  for (size_t i = 0; i < pin.bytes / 8; ++i) {
    if (i * 8 >= deaf || __atomic_load_n(&pin.bar[i], __ATOMIC_RELAXED) == kUntouched) continue;
    const uint64_t stored = __atomic_exchange_n(&pin.bar[i], kUntouched, __ATOMIC_ACQUIRE);
    __atomic_store_n(&device[i], stored ^ (i * 8 >= spoils), __ATOMIC_RELAXED);
  }
}

bool ordered() { return number("ordering=", 100) >= 100; }

bool within(const std::map<uint64_t, size_t>& known, uint64_t at, size_t bytes) {
  auto found = known.upper_bound(at);
  return found != known.begin() && at + bytes <= std::prev(found)->first + std::prev(found)->second;
}

int begin(void* stream, Copy copy, bool to_device) {
  if (!current || !streams.count(stream)) return fault("a copy on no stream of its own, or without a context");
  if (!mapping_of(to_device ? copy.to : copy.from, copy.bytes)) return fault("a copy to or from nothing");
  if (!within(hosts, to_device ? copy.from : copy.to, copy.bytes)) return fault("a copy of memory that is not pinned");
  if (!fills.empty()) return fault("a copy that a fill may overtake");
  streams[stream].copies.push_back(copy);
  streams[stream].asked = false;
  return kOk;
}

void end(Stream& stream) {
  for (const Copy& copy : stream.copies) {
    memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
    auto device = mapped.upper_bound(copy.to);
    if (device == mapped.begin() || copy.to >= std::prev(device)->first + std::prev(device)->second.bytes) continue;
    const uint64_t spoiled = std::prev(device)->first + uint64_t(number("copy_spoils=", INT32_MAX));
    for (uint64_t at = std::max(copy.to, spoiled); at < copy.to + copy.bytes; ++at)
      *reinterpret_cast<uint8_t*>(at) ^= 1;
  }
  stream.copies.clear();
}

bool under_way(uint64_t at, size_t bytes) {
  for (auto& [name, stream] : streams)
    for (const Copy& copy : stream.copies)
      for (uint64_t end : {copy.to, copy.from})
        if (end < at + bytes && at < end + copy.bytes) return true;
  return false;
}

}  // namespace

#define ENTER(call)            \
  std::lock_guard lock(mutex); \
  note("%s", call);            \
  if (fails(call)) return kFailed

API int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kNoDevice  ? "CUDA_ERROR_NO_DEVICE"
                                : "CUDA_ERROR_UNKNOWN";
  return kOk;
}
API int cuInit(unsigned) {
  ENTER("cuInit");
  return word("no_device").empty() ? kOk : kNoDevice;
}
API int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet");
  *device = ordinal;
  return ordinal == 0 ? kOk : kNoDevice;
}
API int cuDeviceGetUuid_v2(unsigned char* uuid, int) {
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(i);
  uuid[15] = static_cast<unsigned char>(number("uuid=", 15));
  return kOk;
}
API int cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER("cuDeviceGetAttribute");
  *value = attribute == 117   ? number("flush=", 1)
           : attribute == 118 ? number("ordering=", 100)
           : attribute == 116 ? word("no_rdma").empty()
           : attribute == 103 ? word("no_export").empty()
                              : 1;
  return kOk;
}
API int cuDevicePrimaryCtxRetain(void** context, int) {
  ENTER("cuDevicePrimaryCtxRetain");
  ++contexts;
  *context = &the_context;
  return kOk;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
  ENTER("cuDevicePrimaryCtxRelease");
  if (--contexts < 0) return fault("a context is released twice");
  if (contexts == 0 && !(mapped.empty() && reserved.empty() && pins.empty() && streams.empty() && hosts.empty()))
    return fault("a context goes before its memory");
  return kOk;
}
API int cuCtxSetCurrent(void* context) {
  current = context == &the_context;
  return kOk;
}
API int cuFlushGPUDirectRDMAWrites(int, int scope) {
  ENTER("cuFlushGPUDirectRDMAWrites");
  if (!current) return fault("a flush on a thread without a context");
  if (scope != 100 || !(number("flush=", 1) & 1)) return fault("a flush that the device does not have");
  if (ordered()) return kOk;  // documented: does nothing
  for (auto& [handle, pin] : pins) publish(pin);
  return kOk;
}
API int cuMemGetAllocationGranularity(size_t* bytes, const Shape*, int) {
  ENTER("cuMemGetAllocationGranularity");
  *bytes = kGranule;
  return kOk;
}
API int cuMemCreate(unsigned long long* handle, size_t bytes, const Shape* shape, unsigned long long) {
  ENTER("cuMemCreate");
  if (bytes == 0 || bytes % kGranule != 0) return fault("an allocation that is not in granules");
  if (shape->type != 1 || shape->handles != 1 || shape->location.type != 1)
    return fault("an allocation of no known shape");
  if (!word("full").empty()) return kOutOfMemory;
  int fd = memfd_create("gpu", MFD_CLOEXEC);
  if (ftruncate(fd, off_t(bytes)) != 0) abort();
  void* at = mmap(nullptr, bytes, PROT_WRITE, MAP_SHARED, fd, 0);
  memset(at, 0xEE, bytes);  // another user's
  munmap(at, bytes);
  memories[*handle = next_handle++] = new Memory{fd, bytes, shape->rdma == 1, false, 0};
  return kOk;
}
API int cuMemRelease(unsigned long long handle) {
  ENTER("cuMemRelease");
  auto found = memories.find(handle);
  if (found == memories.end()) return fault("an allocation is released twice");
  Memory* memory = found->second;
  memories.erase(found);
  memory->released = true;
  if (memory->maps > 0) return fault("an allocation is released while it is mapped");
  close(memory->fd);
  delete memory;
  return kOk;
}
API int cuMemExportToShareableHandle(void* to, unsigned long long handle, int type, unsigned long long) {
  ENTER("cuMemExportToShareableHandle");
  if (type != 1 || !memories.count(handle)) return fault("what is exported is no allocation");
  *static_cast<int*>(to) = fcntl(memories[handle]->fd, F_DUPFD_CLOEXEC, 0);
  return kOk;
}
API int cuMemImportFromShareableHandle(unsigned long long* handle, void* from, int type) {
  ENTER("cuMemImportFromShareableHandle");
  struct stat info;
  int fd = fcntl(int(reinterpret_cast<intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  if (type != 1 || fd < 0 || fstat(fd, &info) != 0) return kInvalid;
  memories[*handle = next_handle++] = new Memory{fd, size_t(info.st_size), false, false, 0};
  return kOk;
}
API int cuMemAddressReserve(uint64_t* to, size_t bytes, size_t align, uint64_t, unsigned long long) {
  ENTER("cuMemAddressReserve");
  void* at = mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  uint64_t begin = reinterpret_cast<uint64_t>(at);
  *to = (begin + align - 1) / align * align;
  if (*to > begin) munmap(at, *to - begin);
  if (size_t rest = begin + align - *to) munmap(reinterpret_cast<void*>(*to + bytes), rest);
  reserved[*to] = bytes;
  return kOk;
}
API int cuMemAddressFree(uint64_t at, size_t bytes) {
  ENTER("cuMemAddressFree");
  if (!reserved.count(at) || reserved[at] != bytes) return fault("an address is freed twice");
  if (mapped.count(at)) return fault("an address is freed while something is mapped there");
  munmap(reinterpret_cast<void*>(at), bytes);
  reserved.erase(at);
  return kOk;
}
API int cuMemMap(uint64_t at, size_t bytes, size_t, unsigned long long handle, unsigned long long) {
  ENTER("cuMemMap");
  if (!reserved.count(at) || !memories.count(handle)) return fault("a mapping of nothing");
  Memory* memory = memories[handle];
  if (bytes != memory->bytes) return kInvalid;
  if (mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) abort();
  ++memory->maps;
  mapped[at] = {bytes, memory, false};
  return kOk;
}
API int cuMemSetAccess(uint64_t at, size_t bytes, const Access* access, size_t count) {
  ENTER("cuMemSetAccess");
  if (!mapped.count(at) || count != 1 || access->flags != 3) return fault("access to nothing");
  mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE);
  mapped[at].readable = true;
  return kOk;
}
API int cuMemUnmap(uint64_t at, size_t bytes) {
  ENTER("cuMemUnmap");
  if (!mapped.count(at)) return fault("a mapping ends twice");
  for (auto& [handle, pin] : pins)
    if (pin.at == at) return fault("a mapping ends while it is pinned");
  if (under_way(at, bytes)) return fault("a mapping ends under a copy");
  --mapped[at].memory->maps;
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  mapped.erase(at);
  return kOk;
}
API int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t bytes) {
  ENTER("cuMemsetD8");
  if (!current || !mapping_of(at, bytes)) return fault("a fill of nothing, or without a context");
  if (value != 0) return fault("a fill with something");
  fills.push_back({at, 0, bytes});
  return kOk;
}
API int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  ENTER("cuMemcpyDtoH");
  if (!current || !mapping_of(from, bytes)) return fault("a copy of nothing, or without a context");
  for (const Copy& fill : fills) memset(reinterpret_cast<void*>(fill.to), 0, fill.bytes);
  fills.clear();
  memcpy(to, reinterpret_cast<void*>(from), bytes);
  return kOk;
}
API int cuMemHostAlloc(void** to, size_t bytes, unsigned) {
  ENTER("cuMemHostAlloc");
  if (!current) return fault("pinned memory without a context");
  *to = aligned_alloc(4096, bytes);
  hosts[reinterpret_cast<uint64_t>(*to)] = bytes;
  return kOk;
}
API int cuMemFreeHost(void* memory) {
  ENTER("cuMemFreeHost");
  auto found = hosts.find(reinterpret_cast<uint64_t>(memory));
  if (found == hosts.end()) return fault("pinned memory is freed twice");
  if (under_way(found->first, found->second)) return fault("pinned memory is freed under a copy");
  hosts.erase(found);
  free(memory);
  return kOk;
}
API int cuStreamCreate(void** to, unsigned flags) {
  ENTER("cuStreamCreate");
  if (!current || flags != 1) return fault("a stream without a context, or one that waits for others");
  *to = reinterpret_cast<void*>(next_handle++);
  streams[*to] = {};
  return kOk;
}
API int cuStreamDestroy_v2(void* stream) {
  ENTER("cuStreamDestroy");
  if (!streams.count(stream)) return fault("a stream ends twice");
  if (!streams[stream].copies.empty()) return fault("a stream ends under its copies");
  streams.erase(stream);
  return kOk;
}
API int cuStreamQuery(void* stream) {
  std::lock_guard lock(mutex);  // no note: it is asked until it answers
  if (fails("cuStreamQuery")) return kFailed;
  if (!current || !streams.count(stream)) return fault("a query of nothing, or without a context");
  Stream& asked = streams[stream];
  if (asked.copies.empty()) return kOk;
  if (!asked.asked || !word("stuck").empty()) return asked.asked = true, kNotReady;
  end(asked);
  return kOk;
}
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  ENTER("cuMemcpyHtoDAsync");
  return begin(stream, {to, reinterpret_cast<uint64_t>(from), bytes}, true);
}
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  ENTER("cuMemcpyDtoHAsync");
  return begin(stream, {reinterpret_cast<uint64_t>(to), from, bytes}, false);
}

namespace {

int begin_all(const uint64_t* to, const uint64_t* from, const size_t* bytes, size_t count,
              const CopyAttributes* attributes, const size_t* firsts, size_t given, void* stream) {
  if (count == 0 || given != 1 || firsts[0] != 0 || attributes->source_order != 1 || attributes->flags != 0)
    return fault("a batch of nothing, or of attributes that do not hold for all of it");
  for (size_t i = count; i-- > 0;)  // in no order that was promised
    if (int error = begin(stream, {to[i], from[i], bytes[i]}, true)) return error;
  return kOk;
}

}  // namespace

#ifdef GPU_DOUBLE_CUDA_12
API int cuMemcpyBatchAsync(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                           size_t* firsts, size_t given, size_t* failed, void* stream) {
  ENTER("cuMemcpyBatchAsync");
  *failed = SIZE_MAX;
  return begin_all(to, from, bytes, count, attributes, firsts, given, stream);
}
#elif !defined(GPU_DOUBLE_OLD)
API int cuMemcpyBatchAsync_v2(uint64_t* to, uint64_t* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                              size_t* firsts, size_t given, void* stream) {
  ENTER("cuMemcpyBatchAsync_v2");
  return begin_all(to, from, bytes, count, attributes, firsts, given, stream);
}
#endif

struct Handle {
  unsigned long h;
};

namespace {

int pin_buffer(void* gdr, unsigned long at, size_t bytes, Handle* handle) {
  Mapped* found = mapping_of(at, bytes);
  if (!word("bar_full").empty()) return ENOMEM;
  if (gdr != &the_gdr || !found) return fault("what is pinned is not mapped"), EINVAL;
  if (at % kPage != 0 || bytes % kPage != 0) return fault("what is pinned is not in pages of 64 KiB"), EINVAL;
  if (!found->memory->rdma || !found->readable)
    return fault("what is pinned is not for RDMA, or not accessible"), EINVAL;
  pins[handle->h = next_handle++] = {at, bytes, nullptr};
  return 0;
}

int map_buffer(Handle handle, void** to, size_t bytes) {
  if (!pins.count(handle.h) || pins[handle.h].bar) return fault("a BAR mapping of nothing, or a second one"), EINVAL;
  Pin& pin = pins[handle.h];
  pin.bar = static_cast<uint64_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (size_t i = 0; i < bytes / 8; ++i) pin.bar[i] = kUntouched;
  *to = pin.bar;
  return 0;
}

}  // namespace

API void* gdr_open() {
  std::lock_guard lock(mutex);
  note("gdr_open");
  if (!word("no_module").empty()) return nullptr;
  ++opened;
  return &the_gdr;
}
API int gdr_close(void* gdr) {
  ENTER("gdr_close");
  if (gdr != &the_gdr || --opened < 0) return fault("the library is closed twice");
  if (opened == 0 && !pins.empty()) return fault("the library is closed before its pins");
  return 0;
}
#ifdef GPU_DOUBLE_OLD
API int gdr_pin_buffer(void* gdr, unsigned long at, size_t bytes, uint64_t, uint32_t, Handle* handle) {
  ENTER("gdr_pin_buffer");
  return pin_buffer(gdr, at, bytes, handle);
}
API int gdr_map(void*, Handle handle, void** to, size_t bytes) {
  ENTER("gdr_map");
  return map_buffer(handle, to, bytes);
}
#else
API int gdr_pin_buffer_v2(void* gdr, unsigned long at, size_t bytes, uint32_t, Handle* handle) {
  ENTER("gdr_pin_buffer_v2");
  return pin_buffer(gdr, at, bytes, handle);
}
API int gdr_map_v2(void*, Handle handle, void** to, size_t bytes, int) {
  ENTER("gdr_map_v2");
  return map_buffer(handle, to, bytes);
}
#endif
API int gdr_unmap(void*, Handle handle, void* bar, size_t bytes) {
  ENTER("gdr_unmap");
  if (!pins.count(handle.h) || pins[handle.h].bar != bar) return fault("a BAR mapping ends twice"), EINVAL;
  munmap(bar, bytes);
  pins[handle.h].bar = nullptr;
  return 0;
}
API int gdr_unpin_buffer(void*, Handle handle) {
  ENTER("gdr_unpin_buffer");
  if (!pins.count(handle.h)) return fault("a pin ends twice"), EINVAL;
  if (pins[handle.h].bar) fault("a pin ends before its mapping");
  pins.erase(handle.h);
  return 0;
}
// A read comes back behind what was stored before it; that it shows there does not say that kernels see it.
API int gdr_copy_from_mapping(Handle handle, void* to, const void* from, size_t bytes) {
  ENTER("gdr_copy_from_mapping");
  if (!pins.count(handle.h) || !pins[handle.h].bar) return fault("a read of nothing"), EINVAL;
  Pin& pin = pins[handle.h];
  if (ordered()) publish(pin);
  uint64_t offset = reinterpret_cast<uint64_t>(from) - reinterpret_cast<uint64_t>(pin.bar);
  for (size_t i = 0; i < bytes; ++i) {
    bool stored = pin.bar[(offset + i) / 8] != kUntouched;
    static_cast<uint8_t*>(to)[i] =
        stored ? static_cast<const uint8_t*>(from)[i] : reinterpret_cast<const uint8_t*>(pin.at)[offset + i];
  }
  return 0;
}

// In place of the environment, which no thread may change under another.
API void gpu_double_set(const char* words, const char* log) {
  std::lock_guard lock(mutex);
  all_words = words;
  log_path = log;
}

// Allocations, addresses, mappings, pins, streams, pinned memory, contexts and opened libraries that are left in this
// process.
API int gpu_double_live() {
  std::lock_guard lock(mutex);
  return int(memories.size() + reserved.size() + mapped.size() + pins.size() + streams.size() + hosts.size()) +
         contexts + opened;
}
