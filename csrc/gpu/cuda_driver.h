// The few calls of the CUDA driver that windows need, found at run time: nothing is built or linked against CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/library.h"

namespace headgate {

// Types and numbers of cuda.h, versions 12 and 13.
namespace cuda {

using Pointer = unsigned long long;
using Allocation = unsigned long long;
using Stream = void*;

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
struct CopyAttributes {
  int source_order;
  Location source, target;  // hints, for memory that the driver moves
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

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
  // As nvidia-smi writes it, without what it begins with (GPU- or MIG-): the same in every process.
  std::string uuid() const;
  // Makes the context this thread's.
  void enter() const;
  // Until what has arrived over the bus is visible on the device, for kernels that run too. On a thread that `enter`s.
  void flush_writes() const;

  // Device memory that can be exported as a descriptor; for_rdma: and mapped by GDRCopy.
  uint64_t granularity(bool for_rdma) const;
  cuda::Allocation create(uint64_t bytes, bool for_rdma) const;
  int export_descriptor(cuda::Allocation allocation) const;
  cuda::Allocation import_descriptor(int fd) const;
  void release(cuda::Allocation allocation) const { mem_release_(allocation); }
  cuda::Pointer reserve(uint64_t bytes, uint64_t align) const;
  void unreserve(cuda::Pointer at, uint64_t bytes) const { address_free_(at, bytes); }
  void map(cuda::Pointer at, uint64_t bytes, cuda::Allocation allocation) const;
  void allow_access(cuda::Pointer at, uint64_t bytes) const;
  void unmap(cuda::Pointer at, uint64_t bytes) const { mem_unmap_(at, bytes); }

  // These return when they have ended.
  void zero(cuda::Pointer at, uint64_t bytes) const;
  void read(void* to, cuda::Pointer from, uint64_t bytes) const;

  // A stream that waits for no other, and none for it, and memory of the host that it copies from and to by itself. Its
  // calls are made on a thread that `enter`s, and return before what they begin has ended.
  cuda::Stream make_stream() const;
  void end_stream(cuda::Stream stream) const { stream_destroy_(stream); }
  uint8_t* pin(uint64_t bytes) const;
  void unpin(uint8_t* memory) const { host_free_(memory); }
  // to[i], from[i], bytes[i]: a piece, of pinned memory; in any order.
  void begin_copies(std::vector<cuda::Pointer>& to, std::vector<cuda::Pointer>& from, std::vector<size_t>& bytes,
                    cuda::Stream stream) const;
  void begin_read(uint8_t* to, cuda::Pointer from, uint64_t bytes, cuda::Stream stream) const;
  bool has_ended(cuda::Stream stream) const;

 private:
  void check(int result, const char* call) const;
  cuda::AllocationShape shape(bool for_rdma) const;

  const Library library_;
  int device_ = 0;
  void* context_ = nullptr;

  int (*error_name_)(int, const char**);
  int (*init_)(unsigned);
  int (*device_get_)(int*, int);
  int (*device_get_attribute_)(int*, int, int);
  int (*device_get_uuid_)(uint8_t*, int);
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
  int (*memset_)(cuda::Pointer, unsigned char, size_t);
  int (*copy_to_host_)(void*, cuda::Pointer, size_t);
  int (*stream_create_)(cuda::Stream*, unsigned);
  int (*stream_destroy_)(cuda::Stream);
  int (*stream_query_)(cuda::Stream);
  int (*host_alloc_)(void**, size_t, unsigned);
  int (*host_free_)(void*);
  int (*begin_to_device_)(cuda::Pointer, const void*, size_t, cuda::Stream);
  int (*begin_to_host_)(void*, cuda::Pointer, size_t, cuda::Stream);
  // Of CUDA 13, and of 12.8.
  int (*batch_)(cuda::Pointer*, cuda::Pointer*, size_t*, size_t, cuda::CopyAttributes*, size_t*, size_t, cuda::Stream);
  int (*batch_12_)(cuda::Pointer*, cuda::Pointer*, size_t*, size_t, cuda::CopyAttributes*, size_t*, size_t, size_t*,
                   cuda::Stream);
};

}  // namespace headgate
