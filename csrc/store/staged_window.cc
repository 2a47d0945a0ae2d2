#include "store/staged_window.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace headgate {
namespace {

thread_local char this_thread;  // its address names the thread

}  // namespace

StagedDevice::StagedDevice(std::shared_ptr<CudaDriver> driver, const WindowSettings& settings) try
    : driver_(std::move(driver)), lanes_(settings.threads) {
  require_attributes(*driver_, {kVirtualMemory, kExport});
} catch (const DeviceError& error) {
  throw error_of(error);
}

// What still runs at the process's end reads and writes it for good.
StagedDevice::~StagedDevice() {
  for (Left& left : left_)
    for (auto& lane : left.lanes)
      if (!lane->copies.has_ended()) static_cast<void>(left.memory.release()), static_cast<void>(lane.release());
}

StagedLanes StagedDevice::make_lanes() const {
  StagedLanes lanes;
  for (uint32_t i = 0; i < lanes_; ++i) lanes.push_back(std::make_unique<StagedLane>(driver_, patience_));
  return lanes;
}

void StagedDevice::leave(StagedLanes lanes, std::unique_ptr<DeviceMemory> memory) {
  std::lock_guard lock(mutex_);
  try {
    left_.reserve(left_.size() + 1);
  } catch (const std::bad_alloc&) {
    for (auto& lane : lanes) static_cast<void>(lane.release());
    return static_cast<void>(memory.release());
  }
  left_.push_back({std::move(memory), std::move(lanes)});
}

void StagedDevice::clear() {
  std::lock_guard lock(mutex_);
  std::erase_if(left_, [](Left& left) {
    return std::ranges::all_of(left.lanes, [](auto& lane) { return lane->copies.has_ended(); });
  });
  if (left_.size() >= kLeftMax)
    throw DeviceError(
        "the device stands still: copies to " + std::to_string(left_.size()) + " windows that are gone have not ended",
        true);
}

StagedWindow::StagedWindow(std::shared_ptr<StagedDevice> device, uint64_t bytes) try
    : DeviceWindow((device->clear(), device->driver()), bytes, false), device_(std::move(device)) {
  lanes_ = device_->make_lanes();
} catch (const DeviceError& error) {
  throw error_of(error);
}

// A device that stands still may copy later.
StagedWindow::~StagedWindow() {
  const bool at_rest = std::ranges::all_of(lanes_, [](auto& lane) { return lane->copies.at_rest(); });
  if (!at_rest) device_->leave(std::move(lanes_), std::move(memory_));
}

StagedLane* StagedWindow::mine() const {
  for (auto& lane : lanes_)
    if (lane->owner.load(std::memory_order_relaxed) == &this_thread) return lane.get();
  return nullptr;
}

StagedLane& StagedWindow::take() {
  if (StagedLane* lane = mine()) return *lane;
  for (auto& lane : lanes_) {
    const void* nobody = nullptr;
    if (lane->owner.compare_exchange_strong(nobody, &this_thread, std::memory_order_acquire)) return *lane;
  }
  throw DeviceError("more threads deliver to a window than it was made for");
}

void StagedWindow::deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool) try {
  if (!broken()) take().copies.put(from, memory_->address(), to, count, bytes);
} catch (const DeviceError&) {
  set_broken();  // which the fence says
}

void StagedWindow::flush() {
  StagedLane* lane = mine();
  if (!lane) return;
  lane->copies.finish();
  lane->owner.store(nullptr, std::memory_order_release);
}

void StagedWindow::read_back(uint64_t from, uint8_t* to, uint64_t bytes) {
  for (StagedLane& lane = take(); bytes > 0;) {
    const uint64_t part = std::min(bytes, CopyLane::kBatchBytes);
    lane.copies.read(to, memory_->address() + from, part);
    from += part, to += part, bytes -= part;
  }
  flush();
}

}  // namespace headgate
