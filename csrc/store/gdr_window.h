// A window in a device's memory, which the daemon allocates, maps through the device's BAR, and stores to directly.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "gpu/device_memory.h"
#include "gpu/gdr_library.h"
#include "store/window.h"

namespace headgate {

// The device of all such windows, and how stores to it are made visible.
class GdrDevice {
 public:
  // FAILED_PRECONDITION with what is missing.
  explicit GdrDevice(const WindowSettings& settings);

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

class GdrWindow : public Window {
 public:
  GdrWindow(std::shared_ptr<GdrDevice> device, uint64_t bytes);
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;
  bool fence() override;
  void answer(Cell& cell, CellValue value) override { store_cell(cell, value); }
  int descriptor() const override { return memory_.descriptor(); }

  // Stores patterns and reads them back from both ends. FAILED_PRECONDITION if they differ.
  void self_test();

 private:
  void flush();
  void push_probe();

  const std::shared_ptr<GdrDevice> device_;
  const uint64_t bytes_;  // that the worker asked for
  DeviceMemory memory_;
  GdrLibrary::Handle pinned_{};
  uint8_t* mapping_ = nullptr;
  std::atomic<bool> broken_{false};
  Undo undo_;  // last: the mapping goes before its pin, and both before the memory
};

}  // namespace headgate
