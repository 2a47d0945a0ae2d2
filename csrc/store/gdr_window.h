// A window in a device's memory that the daemon maps through the device's BAR, and stores to directly.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/gdr_library.h"
#include "store/device_window.h"

namespace headgate {

// The device of all such windows, and how stores to it are made visible.
class GdrDevice {
 public:
  // FAILED_PRECONDITION with what is missing.
  GdrDevice(std::shared_ptr<CudaDriver> driver, const WindowSettings& settings);

  const std::shared_ptr<CudaDriver>& driver() const { return driver_; }
  GdrLibrary& gdr() { return gdr_; }
  // A flush by the driver reaches kernels that run already. Where the device orders what arrives by itself, arriving is
  // enough: a read over the bus comes back behind all stores of this thread.
  bool flushed_by_driver() const { return flushed_by_driver_; }

 private:
  const std::shared_ptr<CudaDriver> driver_;
  const bool flushed_by_driver_;
  GdrLibrary gdr_;
};

class GdrWindow : public DeviceWindow {
 public:
  // FAILED_PRECONDITION, RESOURCE_EXHAUSTED.
  GdrWindow(std::shared_ptr<GdrDevice> device, uint64_t bytes);
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;

 private:
  void flush() override;
  void read_back(uint64_t from, uint8_t* to, uint64_t bytes) override;

  const std::shared_ptr<GdrDevice> device_;
  GdrLibrary::Handle pinned_{};
  uint8_t* mapping_ = nullptr;
  Undo undo_;  // the mapping goes before its pin, and both before the memory
};

}  // namespace headgate
