// A window in a device's memory, which the daemon allocates and the worker imports.
#pragma once

#include <atomic>
#include <memory>

#include "gpu/device_memory.h"
#include "store/error.h"
#include "store/window.h"

namespace headgate {

// RESOURCE_EXHAUSTED if the device has no memory left, FAILED_PRECONDITION otherwise.
Error error_of(const DeviceError& error);

// DeviceError unless the device has each of them, given as (attribute, what it is called).
void require_attributes(const CudaDriver& driver,
                        std::initializer_list<std::pair<cuda::Attribute, const char*>> attributes);

// Those that memory of a window needs.
inline constexpr std::pair<cuda::Attribute, const char*> kVirtualMemory{cuda::kVirtualMemory,
                                                                        "virtual memory management"};
inline constexpr std::pair<cuda::Attribute, const char*> kExport{cuda::kPosixHandles,
                                                                 "memory that can be exported as a descriptor"};

class DeviceWindow : public Window {
 public:
  bool fence() final;
  void answer(Cell& cell, CellValue value) final { store_cell(cell, value); }
  int descriptor() const final { return memory_->descriptor(); }
  bool readable() const final { return true; }
  bool read(uint64_t from, uint8_t* to, uint64_t bytes) final;

  // Delivers patterns and reads back what the device holds. FAILED_PRECONDITION if it is something else.
  void self_test();

 protected:
  DeviceWindow(std::shared_ptr<CudaDriver> driver, uint64_t bytes, bool for_rdma);
  CudaDriver& driver() const { return memory_->driver(); }
  // After a failure nobody knows what the device sees, now or later: nothing is delivered or fenced any more.
  bool broken() const { return broken_.load(std::memory_order_relaxed); }
  void set_broken() { broken_.store(true, std::memory_order_relaxed); }

  // What this thread has delivered is visible on the device when it returns. DeviceError.
  virtual void flush() = 0;
  // What the device holds there, behind a flush of this thread. DeviceError.
  virtual void read_back(uint64_t from, uint8_t* to, uint64_t bytes) = 0;

  const uint64_t bytes_;  // that the worker asked for
  std::unique_ptr<DeviceMemory> memory_;

 private:
  std::atomic<bool> broken_{false};
};

}  // namespace headgate
