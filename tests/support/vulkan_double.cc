// Stands in for libvulkan and the calls of libcuda that import its memory, in one library. Memory of the device is a
// memfd; what was stored to it is seen at once.
//
// VULKAN_DOUBLE, words: no_device; hidden: no memory is visible to the host; other: CUDA has another device; elsewhere:
// CUDA maps other memory than was exported; no_extension: devices lack VK_KHR_external_memory_fd; full: no memory is
// left; fails=CALL: that call fails.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kOutOfDeviceMemory = -2, kMapFailed = -5, kNoExtension = -7, kFailed = -3, kInvalid = 1;
constexpr uint32_t kDeviceLocal = 1, kHostVisible = 2, kHostCoherent = 4;
constexpr unsigned char kUuid[16] = {7, 7, 7};

struct Memory {
  int fd;
  uint64_t bytes;
  void* mapped;
};
struct Imported {
  int fd;
  uint64_t bytes;
  void* mapped;
};
struct Chained {
  int type;
  void* next;
};
int live = 0;
uint64_t mapped_bytes = 0;

bool said(const std::string& word) {
  const char* words = getenv("VULKAN_DOUBLE");
  return words && (" " + std::string(words) + " ").find(" " + word + " ") != std::string::npos;
}

bool fails(const char* call) { return said(std::string("fails=") + call); }

}  // namespace

API int vulkan_double_live() { return live; }

API int vkCreateInstance(const Chained*, const void*, void** instance) {
  if (fails("vkCreateInstance")) return kFailed;
  *instance = new int(0);
  live++;
  return 0;
}
API void vkDestroyInstance(void* instance, const void*) {
  if (instance) live--;
  delete static_cast<int*>(instance);
}
API int vkEnumeratePhysicalDevices(void*, uint32_t* count, void** devices) {
  static int device;
  if (said("no_device"))
    *count = 0;
  else if (!devices)
    *count = 1;
  else
    devices[0] = &device;
  return 0;
}
API void vkGetPhysicalDeviceProperties2(void*, Chained* properties) {
  strcpy(reinterpret_cast<char*>(properties) + 16 + 20, "Double");
  memcpy(static_cast<char*>(properties->next) + 16, kUuid, sizeof kUuid);
}
API void vkGetPhysicalDeviceMemoryProperties(void*, void* properties) {
  uint32_t* words = static_cast<uint32_t*>(properties);
  const uint32_t visible = said("hidden") ? 0 : kHostVisible | kHostCoherent;
  const uint32_t types[] = {2, kDeviceLocal, 0, kDeviceLocal | visible, 1};
  memcpy(words, types, sizeof types);
  words[65] = 2;  // heaps, behind 32 types
  uint64_t heap[] = {1ull << 34, 1, 1ull << 28, 1};
  memcpy(static_cast<char*>(properties) + 264, heap, sizeof heap);
}
API int vkCreateDevice(void*, const void* wanted, const void*, void** device) {
  const char* const* extensions = *reinterpret_cast<const char* const* const*>(static_cast<const char*>(wanted) + 56);
  if (said("no_extension") || strcmp(extensions[0], "VK_KHR_external_memory_fd")) return kNoExtension;
  *device = new int(0);
  live++;
  return 0;
}
API void vkDestroyDevice(void* device, const void*) {
  live--;
  delete static_cast<int*>(device);
}
API int vkAllocateMemory(void*, const Chained* wanted, const void*, Memory** memory) {
  const uint64_t bytes = *reinterpret_cast<const uint64_t*>(wanted + 1);
  const uint32_t type = reinterpret_cast<const uint32_t*>(wanted + 1)[2];
  const uint32_t handles = *reinterpret_cast<const uint32_t*>(static_cast<const Chained*>(wanted->next) + 1);
  if (said("full")) return kOutOfDeviceMemory;
  if (type != 1 || handles != 1) return kFailed;
  *memory = new Memory{memfd_create("vulkan", MFD_CLOEXEC), bytes, nullptr};
  live++;
  return ftruncate((*memory)->fd, static_cast<off_t>(bytes));
}
API void vkFreeMemory(void*, Memory* memory, const void*) {
  if (!memory) return;
  if (memory->mapped) munmap(memory->mapped, memory->bytes);
  close(memory->fd);
  delete memory;
  live--;
}
API int vkMapMemory(void*, Memory* memory, uint64_t offset, uint64_t bytes, uint32_t, void** address) {
  if (fails("vkMapMemory") || offset || bytes != memory->bytes) return kMapFailed;
  *address = memory->mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
  return 0;
}
static int get_fd(void*, const Chained* wanted, int* fd) {
  if (fails("vkGetMemoryFdKHR")) return kFailed;
  *fd = dup((*reinterpret_cast<Memory* const*>(wanted + 1))->fd);
  return 0;
}
API void* vkGetDeviceProcAddr(void*, const char* name) {
  return strcmp(name, "vkGetMemoryFdKHR") ? nullptr : reinterpret_cast<void*>(get_fd);
}

API int cuInit(unsigned) { return fails("cuInit") ? 100 : 0; }
API int cuDeviceGetUuid_v2(unsigned char* uuid, int) {
  memcpy(uuid, kUuid, sizeof kUuid);
  uuid[15] = said("other");
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &live;
  return 0;
}
API int cuCtxSetCurrent(void*) { return 0; }
API int cuImportExternalMemory(Imported** imported, const char* wanted) {
  if (fails("cuImportExternalMemory")) return kInvalid;
  const int type = *reinterpret_cast<const int*>(wanted), fd = *reinterpret_cast<const int*>(wanted + 8);
  const uint64_t bytes = *reinterpret_cast<const uint64_t*>(wanted + 24);
  if (type != 1 || lseek(fd, 0, SEEK_END) < static_cast<off_t>(bytes)) return kInvalid;
  *imported = new Imported{fd, bytes, nullptr};
  live++;
  return 0;
}
API int cuExternalMemoryGetMappedBuffer(uint64_t* pointer, Imported* imported, const uint64_t* wanted) {
  if (wanted[0] || wanted[1] != imported->bytes) return kInvalid;
  const int fd = said("elsewhere") ? -1 : imported->fd;
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  mapped_bytes = imported->bytes;
  *pointer = reinterpret_cast<uint64_t>(mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, flags, fd, 0));
  live++;
  return 0;
}
API int cuMemcpyDtoH_v2(void* to, uint64_t from, uint64_t bytes) {
  if (fails("cuMemcpyDtoH_v2")) return kInvalid;
  memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
API int cuMemFree_v2(uint64_t pointer) {
  live--;
  return munmap(reinterpret_cast<void*>(pointer), mapped_bytes) || fails("cuMemFree_v2") ? kInvalid : 0;
}
API int cuDestroyExternalMemory(Imported* imported) {
  close(imported->fd);
  delete imported;
  live--;
  return 0;
}
