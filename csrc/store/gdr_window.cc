#include "store/gdr_window.h"

#include "store/gather.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace headgate {
namespace {

// How stores that have arrived are made visible; a device that neither orders them nor can be flushed is of no use.
bool flushed_by_driver(const CudaDriver& driver) {
  require_attributes(driver, {kVirtualMemory,
                              kExport,
                              {cuda::kRdma, "GPUDirect RDMA"},
                              {cuda::kRdmaWithVirtualMemory, "GPUDirect RDMA to mapped memory"}});
  if (driver.attribute(cuda::kRdmaOrdering) >= cuda::kOrderedOwner) return false;
  if (driver.attribute(cuda::kRdmaFlushOptions) & cuda::kFlushByHost) return true;
  throw DeviceError("the device neither orders what is stored over the bus nor lets the host flush it");
}

}  // namespace

GdrDevice::GdrDevice(std::shared_ptr<CudaDriver> driver, const WindowSettings& settings) try
    : driver_(std::move(driver)),
      flushed_by_driver_(headgate::flushed_by_driver(*driver_)),
      gdr_(settings.gdr_library) {
} catch (const DeviceError& error) {
  throw error_of(error);
}

GdrWindow::GdrWindow(std::shared_ptr<GdrDevice> device, uint64_t bytes) try
    : DeviceWindow(device->driver(), bytes, true), device_(std::move(device)) {
  GdrLibrary& gdr = device_->gdr();
  if (memory_->address() % GdrLibrary::kPageBytes != 0 || memory_->bytes() % GdrLibrary::kPageBytes != 0)
    throw DeviceError("the device's memory is not in pages of 64 KiB");
  pinned_ = gdr.pin(memory_->address(), memory_->bytes());
  undo_.add([this] { device_->gdr().unpin(pinned_); });
  mapping_ = gdr.map(pinned_, memory_->bytes());
  undo_.add([this] { device_->gdr().unmap(pinned_, mapping_, memory_->bytes()); });
} catch (const DeviceError& error) {
  throw error_of(error);
}

// Never through the caches: the mapping combines writes, and whole lines are one write on the bus.
void GdrWindow::deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool) {
  copy_records(from, mapping_, to, count, bytes, true);
}

void GdrWindow::flush() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  if (device_->flushed_by_driver()) return driver().flush_writes();
  uint32_t behind;
  device_->gdr().read(pinned_, &behind, mapping_, sizeof behind);
}

void GdrWindow::read_back(uint64_t from, uint8_t* to, uint64_t bytes) {
  device_->gdr().read(pinned_, to, mapping_ + from, bytes);
}

}  // namespace headgate
