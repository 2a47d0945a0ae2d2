// Memory of a device that another process maps too: made here, or imported from its descriptor.
#pragma once

#include <memory>

#include "gpu/cuda_driver.h"
#include "gpu/undo.h"

namespace headgate {

// In whole granules. The one end's mapping outlives the other end.
class DeviceMemory {
 public:
  // Zeroed: nobody else's bytes are in it. for_rdma: GDRCopy can map it. DeviceError.
  DeviceMemory(std::shared_ptr<CudaDriver> driver, uint64_t bytes, bool for_rdma)
      : DeviceMemory(std::move(driver), bytes, for_rdma, -1) {
    driver_->zero(address_, bytes_);
  }
  // What another process made with the same numbers; the caller keeps the descriptor. DeviceError.
  static std::unique_ptr<DeviceMemory> import(std::shared_ptr<CudaDriver> driver, uint64_t bytes, bool for_rdma,
                                              int fd) {
    return std::unique_ptr<DeviceMemory>(new DeviceMemory(std::move(driver), bytes, for_rdma, fd));
  }

  CudaDriver& driver() const { return *driver_; }
  cuda::Pointer address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  // A new descriptor, the caller's.
  int descriptor() const { return driver_->export_descriptor(allocation_); }

 private:
  DeviceMemory(std::shared_ptr<CudaDriver> driver, uint64_t bytes, bool for_rdma, int fd) : driver_(std::move(driver)) {
    driver_->enter();
    const uint64_t granule = driver_->granularity(for_rdma);
    bytes_ = (bytes + granule - 1) / granule * granule;
    allocation_ = fd < 0 ? driver_->create(bytes_, for_rdma) : driver_->import_descriptor(fd);
    undo_.add([this] { driver_->release(allocation_); });
    address_ = driver_->reserve(bytes_, granule);
    undo_.add([this] { driver_->unreserve(address_, bytes_); });
    driver_->map(address_, bytes_, allocation_);
    undo_.add([this] { driver_->unmap(address_, bytes_); });
    driver_->allow_access(address_, bytes_);
  }

  const std::shared_ptr<CudaDriver> driver_;
  uint64_t bytes_ = 0;
  cuda::Allocation allocation_ = 0;
  cuda::Pointer address_ = 0;
  Undo undo_;  // last: its steps need the others
};

}  // namespace headgate
