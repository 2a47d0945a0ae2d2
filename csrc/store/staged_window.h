// A window in a device's memory that is filled by copies of the driver, from pinned memory: where GDRCopy is not to be
// had.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "store/copy_lane.h"
#include "store/device_window.h"

namespace headgate {

// One thread's way into a window. Whose it is between that thread's first delivery and its fence; nobody's otherwise.
struct StagedLane {
  StagedLane(std::shared_ptr<CudaDriver> driver, std::shared_ptr<Patience> patience)
      : copies(std::move(driver), std::move(patience)) {}
  CopyLane copies;
  std::atomic<const void*> owner{nullptr};
};

using StagedLanes = std::vector<std::unique_ptr<StagedLane>>;

// The device of all such windows.
class StagedDevice {
 public:
  // FAILED_PRECONDITION with what is missing.
  StagedDevice(std::shared_ptr<CudaDriver> driver, const WindowSettings& settings);
  ~StagedDevice();

  const std::shared_ptr<CudaDriver>& driver() const { return driver_; }
  StagedLanes make_lanes() const;
  // Keeps what copies may still read and write, until they have ended.
  void leave(StagedLanes lanes, std::unique_ptr<DeviceMemory> memory);
  // Frees what was left to copies that have ended. DeviceError while there are kLeftMax windows whose have not: who
  // makes the device stand still could take all memory so, one window after another.
  void clear();

 private:
  static constexpr size_t kLeftMax = 8;
  struct Left {
    std::unique_ptr<DeviceMemory> memory;
    StagedLanes lanes;  // these go first
  };

  const std::shared_ptr<CudaDriver> driver_;
  const std::shared_ptr<Patience> patience_ = std::make_shared<Patience>();
  const uint32_t lanes_;  // of a window: one for each thread that may deliver at once
  std::mutex mutex_;
  std::vector<Left> left_;
};

class StagedWindow : public DeviceWindow {
 public:
  // FAILED_PRECONDITION, RESOURCE_EXHAUSTED.
  StagedWindow(std::shared_ptr<StagedDevice> device, uint64_t bytes);
  ~StagedWindow() override;
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;

 private:
  StagedLane* mine() const;
  StagedLane& take();
  void flush() override;
  void read_back(uint64_t from, uint8_t* to, uint64_t bytes) override;

  const std::shared_ptr<StagedDevice> device_;
  StagedLanes lanes_;
};

}  // namespace headgate
