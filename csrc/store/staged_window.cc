#include "store/staged_window.h"

#include <algorithm>

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

StagedWindow::StagedWindow(std::shared_ptr<StagedDevice> device, uint64_t bytes) try
    : DeviceWindow(device->driver(), bytes, false) {
  for (uint32_t i = 0; i < device->lanes(); ++i) lanes_.push_back(std::make_unique<Lane>(*device));
} catch (const DeviceError& error) {
  throw error_of(error);
}

// A device that stands still may copy later: then what it reads and writes stays its own for good.
StagedWindow::~StagedWindow() {
  const bool at_rest = std::ranges::all_of(lanes_, [](auto& lane) { return lane->copies.at_rest(); });
  if (at_rest) return;
  for (auto& lane : lanes_) static_cast<void>(lane.release());
  static_cast<void>(memory_.release());
}

StagedWindow::Lane* StagedWindow::mine() const {
  for (auto& lane : lanes_)
    if (lane->owner.load(std::memory_order_relaxed) == &this_thread) return lane.get();
  return nullptr;
}

StagedWindow::Lane& StagedWindow::take() {
  if (Lane* lane = mine()) return *lane;
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
  Lane* lane = mine();
  if (!lane) return;
  lane->copies.finish();
  lane->owner.store(nullptr, std::memory_order_release);
}

void StagedWindow::read_back(uint64_t from, uint8_t* to, uint64_t bytes) {
  for (Lane& lane = take(); bytes > 0;) {
    const uint64_t part = std::min(bytes, CopyLane::kBatchBytes);
    lane.copies.read(to, memory_->address() + from, part);
    from += part, to += part, bytes -= part;
  }
  flush();
}

}  // namespace headgate
