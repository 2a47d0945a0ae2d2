// A window in a device's memory that is filled by copies of the driver, from pinned memory: where GDRCopy is not to be
// had.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "store/copy_lane.h"
#include "store/device_window.h"

namespace headgate {

// The device of all such windows.
class StagedDevice {
 public:
  // FAILED_PRECONDITION with what is missing.
  StagedDevice(std::shared_ptr<CudaDriver> driver, const WindowSettings& settings);

  const std::shared_ptr<CudaDriver>& driver() const { return driver_; }
  const std::shared_ptr<Patience>& patience() const { return patience_; }
  uint32_t lanes() const { return lanes_; }

 private:
  const std::shared_ptr<CudaDriver> driver_;
  const std::shared_ptr<Patience> patience_ = std::make_shared<Patience>();
  const uint32_t lanes_;  // of a window: one for each thread that may deliver at once
};

class StagedWindow : public DeviceWindow {
 public:
  // FAILED_PRECONDITION, RESOURCE_EXHAUSTED.
  StagedWindow(std::shared_ptr<StagedDevice> device, uint64_t bytes);
  ~StagedWindow() override;
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;

 private:
  // Whose it is between its first delivery and its fence; nobody's otherwise.
  struct Lane {
    explicit Lane(const StagedDevice& device) : copies(device.driver(), device.patience()) {}
    CopyLane copies;
    std::atomic<const void*> owner{nullptr};
  };

  Lane* mine() const;
  Lane& take();
  void flush() override;
  void read_back(uint64_t from, uint8_t* to, uint64_t bytes) override;

  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace headgate
