// The few calls of the CUDA driver that windows need, found at run time: nothing is built or linked against CUDA.
#pragma once

#include <cstdint>
#include <string>

#include "gpu/library.h"

namespace headgate {

// Types and numbers of cuda.h, versions 12 and 13.
namespace cuda {

using Pointer = unsigned long long;
using Allocation = unsigned long long;

struct Location {
  int type;
  int id;
};
struct AllocationShape {
  int type;
  int handle_types;
  Location location;
  void* win32;
  uint8_t compression;
  uint8_t rdma;
  uint16_t usage;
  uint8_t reserved[4];
};
static_assert(sizeof(AllocationShape) == 32);
struct Access {
  Location location;
  int flags;
};
static_assert(sizeof(Access) == 12);

enum Attribute : int {
  kVirtualMemory = 102,
  kPosixHandles = 103,
  kRdmaWithVirtualMemory = 110,
  kRdma = 116,
  kRdmaFlushOptions = 117,
  kRdmaOrdering = 118,
};
inline constexpr int kFlushByHost = 1;     // of kRdmaFlushOptions
inline constexpr int kOrderedOwner = 100;  // of kRdmaOrdering, and of a flush

}  // namespace cuda

// A device's primary context. Thread-safe; throws DeviceError.
class CudaDriver {
 public:
  // Loads `library`, initialises it, retains the context.
  CudaDriver(const std::string& library, int device);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;
  ~CudaDriver();

  int attribute(cuda::Attribute attribute) const;
  // Makes the context this thread's.
  void enter() const;
  // Until what has arrived over the bus is visible on the device, for kernels that run too. On a thread that `enter`s.
  void flush_writes() const;

  // Device memory that can be exported as a descriptor, and mapped by GDRCopy.
  uint64_t granularity() const;
  cuda::Allocation create(uint64_t bytes) const;
  int export_descriptor(cuda::Allocation allocation) const;
  cuda::Allocation import_descriptor(int fd) const;
  void release(cuda::Allocation allocation) const { mem_release_(allocation); }
  cuda::Pointer reserve(uint64_t bytes, uint64_t align) const;
  void unreserve(cuda::Pointer at, uint64_t bytes) const { address_free_(at, bytes); }
  void map(cuda::Pointer at, uint64_t bytes, cuda::Allocation allocation) const;
  void allow_access(cuda::Pointer at, uint64_t bytes) const;
  void unmap(cuda::Pointer at, uint64_t bytes) const { mem_unmap_(at, bytes); }
  // Copies of the driver wait for what others store there.
  void synchronise_copies(cuda::Pointer at) const;

  void zero(cuda::Pointer at, uint64_t bytes) const;
  void read(void* to, cuda::Pointer from, uint64_t bytes) const;
  void write(cuda::Pointer to, const void* from, uint64_t bytes) const;

 private:
  void check(int result, const char* call) const;
  cuda::AllocationShape shape() const;

  const Library library_;
  int device_ = 0;
  void* context_ = nullptr;

  int (*error_name_)(int, const char**);
  int (*init_)(unsigned);
  int (*device_get_)(int*, int);
  int (*device_get_attribute_)(int*, int, int);
  int (*primary_retain_)(void**, int);
  int (*primary_release_)(int);
  int (*set_current_)(void*);
  int (*flush_)(int, int);
  int (*mem_granularity_)(size_t*, const cuda::AllocationShape*, int);
  int (*mem_create_)(cuda::Allocation*, size_t, const cuda::AllocationShape*, unsigned long long);
  int (*mem_release_)(cuda::Allocation);
  int (*mem_export_)(void*, cuda::Allocation, int, unsigned long long);
  int (*mem_import_)(cuda::Allocation*, void*, int);
  int (*address_reserve_)(cuda::Pointer*, size_t, size_t, cuda::Pointer, unsigned long long);
  int (*address_free_)(cuda::Pointer, size_t);
  int (*mem_map_)(cuda::Pointer, size_t, size_t, cuda::Allocation, unsigned long long);
  int (*mem_set_access_)(cuda::Pointer, size_t, const cuda::Access*, size_t);
  int (*mem_unmap_)(cuda::Pointer, size_t);
  int (*pointer_set_attribute_)(const void*, int, cuda::Pointer);
  int (*memset_)(cuda::Pointer, unsigned char, size_t);
  int (*copy_to_host_)(void*, cuda::Pointer, size_t);
  int (*copy_to_device_)(cuda::Pointer, const void*, size_t);
};

}  // namespace headgate
