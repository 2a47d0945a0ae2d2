#include "gpu/cuda_driver.h"

namespace headgate {
namespace {

constexpr int kOutOfMemory = 2;
constexpr int kPinned = 1;           // an allocation's type
constexpr int kPosixDescriptor = 1;  // a handle's type
constexpr int kOnDevice = 1;         // a location's type
constexpr int kReadWrite = 3;
constexpr int kMinimum = 0;           // of the granularities
constexpr int kOwnContext = 0;        // whose writes are flushed
constexpr int kNotReady = 600;        // of a query
constexpr unsigned kNonBlocking = 1;  // a stream's flag
constexpr int kInStreamOrder = 1;     // of a copy's source

}  // namespace

CudaDriver::CudaDriver(const std::string& library, int device) : library_(library) {
  library_.find(error_name_, "cuGetErrorName");
  library_.find(init_, "cuInit");
  library_.find(device_get_, "cuDeviceGet");
  library_.find(device_get_attribute_, "cuDeviceGetAttribute");
  library_.find(device_get_uuid_, "cuDeviceGetUuid_v2");
  library_.find(primary_retain_, "cuDevicePrimaryCtxRetain");
  library_.find(primary_release_, "cuDevicePrimaryCtxRelease_v2");
  library_.find(set_current_, "cuCtxSetCurrent");
  library_.find(flush_, "cuFlushGPUDirectRDMAWrites");
  library_.find(mem_granularity_, "cuMemGetAllocationGranularity");
  library_.find(mem_create_, "cuMemCreate");
  library_.find(mem_release_, "cuMemRelease");
  library_.find(mem_export_, "cuMemExportToShareableHandle");
  library_.find(mem_import_, "cuMemImportFromShareableHandle");
  library_.find(address_reserve_, "cuMemAddressReserve");
  library_.find(address_free_, "cuMemAddressFree");
  library_.find(mem_map_, "cuMemMap");
  library_.find(mem_set_access_, "cuMemSetAccess");
  library_.find(mem_unmap_, "cuMemUnmap");
  library_.find(memset_, "cuMemsetD8_v2");
  library_.find(copy_to_host_, "cuMemcpyDtoH_v2");
  library_.find(stream_create_, "cuStreamCreate");
  library_.find(stream_destroy_, "cuStreamDestroy_v2");
  library_.find(stream_query_, "cuStreamQuery");
  library_.find(host_alloc_, "cuMemHostAlloc");
  library_.find(host_free_, "cuMemFreeHost");
  library_.find(begin_to_device_, "cuMemcpyHtoDAsync_v2");
  library_.find(begin_to_host_, "cuMemcpyDtoHAsync_v2");
  library_.find_if_any(batch_, "cuMemcpyBatchAsync_v2");
  library_.find_if_any(batch_12_, "cuMemcpyBatchAsync");
  check(init_(0), "cuInit");
  check(device_get_(&device_, device), "cuDeviceGet");
  check(primary_retain_(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaDriver::~CudaDriver() { primary_release_(device_); }

void CudaDriver::check(int result, const char* call) const {
  if (result == 0) return;
  const char* name = nullptr;
  error_name_(result, &name);
  throw DeviceError(std::string(call) + ": " + (name ? name : std::to_string(result)), result == kOutOfMemory);
}

int CudaDriver::attribute(cuda::Attribute attribute) const {
  int value = 0;
  check(device_get_attribute_(&value, attribute, device_), "cuDeviceGetAttribute");
  return value;
}

std::string CudaDriver::uuid() const {
  uint8_t bytes[16];
  check(device_get_uuid_(bytes, device_), "cuDeviceGetUuid");
  std::string text;
  for (size_t i = 0; i < sizeof bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    for (int digit : {bytes[i] >> 4, bytes[i] & 15}) text += "0123456789abcdef"[digit];
  }
  return text;
}

void CudaDriver::enter() const { check(set_current_(context_), "cuCtxSetCurrent"); }

void CudaDriver::flush_writes() const {
  enter();
  check(flush_(kOwnContext, cuda::kOrderedOwner), "cuFlushGPUDirectRDMAWrites");
}

cuda::AllocationShape CudaDriver::shape(bool for_rdma) const {
  cuda::AllocationShape shape{};
  shape.type = kPinned;
  shape.handle_types = kPosixDescriptor;
  shape.location = {kOnDevice, device_};
  shape.rdma = for_rdma;
  return shape;
}

uint64_t CudaDriver::granularity(bool for_rdma) const {
  size_t bytes = 0;
  cuda::AllocationShape wanted = shape(for_rdma);
  check(mem_granularity_(&bytes, &wanted, kMinimum), "cuMemGetAllocationGranularity");
  return bytes;
}

cuda::Allocation CudaDriver::create(uint64_t bytes, bool for_rdma) const {
  cuda::Allocation made = 0;
  cuda::AllocationShape wanted = shape(for_rdma);
  check(mem_create_(&made, bytes, &wanted, 0), "cuMemCreate");
  return made;
}

int CudaDriver::export_descriptor(cuda::Allocation allocation) const {
  int fd = -1;
  check(mem_export_(&fd, allocation, kPosixDescriptor, 0), "cuMemExportToShareableHandle");
  return fd;
}

cuda::Allocation CudaDriver::import_descriptor(int fd) const {
  cuda::Allocation allocation = 0;
  check(mem_import_(&allocation, reinterpret_cast<void*>(intptr_t{fd}), kPosixDescriptor),
        "cuMemImportFromShareableHandle");
  return allocation;
}

cuda::Pointer CudaDriver::reserve(uint64_t bytes, uint64_t align) const {
  cuda::Pointer at = 0;
  check(address_reserve_(&at, bytes, align, 0, 0), "cuMemAddressReserve");
  return at;
}

void CudaDriver::map(cuda::Pointer at, uint64_t bytes, cuda::Allocation allocation) const {
  check(mem_map_(at, bytes, 0, allocation, 0), "cuMemMap");
}

void CudaDriver::allow_access(cuda::Pointer at, uint64_t bytes) const {
  cuda::Access access{{kOnDevice, device_}, kReadWrite};
  check(mem_set_access_(at, bytes, &access, 1), "cuMemSetAccess");
}

void CudaDriver::zero(cuda::Pointer at, uint64_t bytes) const {
  enter();
  check(memset_(at, 0, bytes), "cuMemsetD8");
  uint8_t last;  // a fill returns before it has ended, a copy behind it does not
  read(&last, at + bytes - 1, 1);
}

void CudaDriver::read(void* to, cuda::Pointer from, uint64_t bytes) const {
  enter();
  check(copy_to_host_(to, from, bytes), "cuMemcpyDtoH");
}

cuda::Stream CudaDriver::make_stream() const {
  cuda::Stream stream = nullptr;
  check(stream_create_(&stream, kNonBlocking), "cuStreamCreate");
  return stream;
}

uint8_t* CudaDriver::pin(uint64_t bytes) const {
  void* memory = nullptr;
  check(host_alloc_(&memory, bytes, 0), "cuMemHostAlloc");
  return static_cast<uint8_t*>(memory);
}

void CudaDriver::begin_copies(std::vector<cuda::Pointer>& to, std::vector<cuda::Pointer>& from,
                              std::vector<size_t>& bytes, cuda::Stream stream) const {
  cuda::CopyAttributes ordered{};
  ordered.source_order = kInStreamOrder;
  size_t first = 0, failed = 0;  // the attributes hold from the first piece on
  if (batch_) {
    check(batch_(to.data(), from.data(), bytes.data(), to.size(), &ordered, &first, 1, stream), "cuMemcpyBatchAsync");
  } else if (batch_12_) {
    check(batch_12_(to.data(), from.data(), bytes.data(), to.size(), &ordered, &first, 1, &failed, stream),
          "cuMemcpyBatchAsync");
  } else {
    for (size_t i = 0; i < to.size(); ++i)
      check(begin_to_device_(to[i], reinterpret_cast<const void*>(from[i]), bytes[i], stream), "cuMemcpyHtoDAsync");
  }
}

void CudaDriver::begin_read(uint8_t* to, cuda::Pointer from, uint64_t bytes, cuda::Stream stream) const {
  check(begin_to_host_(to, from, bytes, stream), "cuMemcpyDtoHAsync");
}

bool CudaDriver::has_ended(cuda::Stream stream) const {
  const int result = stream_query_(stream);
  if (result != kNotReady) check(result, "cuStreamQuery");
  return result != kNotReady;
}

}  // namespace headgate
