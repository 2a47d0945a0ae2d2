#include "store/gdr_window.h"

#include <cstring>
#include <vector>

#include "core/probe.h"
#include "store/error.h"
#include "store/gather.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace headgate {
namespace {

// How stores that have arrived are made visible; a device that neither orders them nor can be flushed is of no use.
bool flushed_by_driver(const CudaDriver& driver) {
  for (auto [attribute, name] : {std::pair(cuda::kVirtualMemory, "virtual memory management"),
                                 std::pair(cuda::kPosixHandles, "memory that can be exported as a descriptor"),
                                 std::pair(cuda::kRdma, "GPUDirect RDMA"),
                                 std::pair(cuda::kRdmaWithVirtualMemory, "GPUDirect RDMA to mapped memory")})
    if (driver.attribute(attribute) == 0) throw DeviceError(std::string("the device has no ") + name);
  if (driver.attribute(cuda::kRdmaOrdering) >= cuda::kOrderedOwner) return false;
  if (driver.attribute(cuda::kRdmaFlushOptions) & cuda::kFlushByHost) return true;
  throw DeviceError("the device neither orders what is stored over the bus nor lets the host flush it");
}

uint64_t checked(uint64_t bytes) {
  if (bytes < kProbeBytes) throw invalid_argument("a window has at least 64 bytes");
  return bytes;
}

Error error_of(const DeviceError& error) {
  return {error.out_of_memory ? "RESOURCE_EXHAUSTED" : "FAILED_PRECONDITION", error.what()};
}

}  // namespace

GdrDevice::GdrDevice(const WindowSettings& settings) try
    : driver_(std::make_shared<CudaDriver>(settings.cuda_library, settings.gpu)),
      flushed_by_driver_(headgate::flushed_by_driver(*driver_)),
      gdr_(settings.gdr_library) {
} catch (const DeviceError& error) {
  throw error_of(error);
}

GdrWindow::GdrWindow(std::shared_ptr<GdrDevice> device, uint64_t bytes) try
    : device_(std::move(device)), bytes_(checked(bytes)), memory_(device_->driver(), bytes) {
  GdrLibrary& gdr = device_->gdr();
  if (memory_.address() % GdrLibrary::kPageBytes != 0 || memory_.bytes() % GdrLibrary::kPageBytes != 0)
    throw DeviceError("the device's memory is not in pages of 64 KiB");
  pinned_ = gdr.pin(memory_.address(), memory_.bytes());
  undo_.add([this] { device_->gdr().unpin(pinned_); });
  mapping_ = gdr.map(pinned_, memory_.bytes());
  undo_.add([this] { device_->gdr().unmap(pinned_, mapping_, memory_.bytes()); });
  push_probe();
} catch (const DeviceError& error) {
  throw error_of(error);
}

// Never through the caches: the mapping combines writes, and whole lines are one write on the bus.
void GdrWindow::deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool) {
  copy_records(from, mapping_, to, count, bytes, true);
}

bool GdrWindow::fence() try {
  if (broken_.load(std::memory_order_relaxed)) return false;
  flush();
  return true;
} catch (const DeviceError&) {
  broken_.store(true, std::memory_order_relaxed);
  return false;
}

void GdrWindow::flush() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  if (device_->flushed_by_driver()) return device_->driver()->flush_writes();
  uint32_t behind;
  device_->gdr().read(pinned_, &behind, mapping_, sizeof behind);
}

void GdrWindow::push_probe() {
  alignas(kProbeBytes) uint8_t probe[kProbeBytes];
  for (uint32_t i = 0; i < kProbeBytes; ++i) probe[i] = probe_byte(i);
  const uint8_t* from[] = {probe, probe};
  const uint64_t to[] = {0, last_probe(bytes_)};
  deliver(from, to, 2, kProbeBytes, true);
  flush();
}

void GdrWindow::self_test() try {
  constexpr uint32_t kRecord = 512;
  std::vector<uint8_t> pattern(bytes_), seen(bytes_);
  std::vector<const uint8_t*> from;
  std::vector<uint64_t> to;
  for (uint64_t at = 0; at + kRecord <= bytes_; at += kRecord) from.push_back(&pattern[at]), to.push_back(at);
  for (uint8_t salt : {0x5A, 0xA5}) {
    for (uint64_t i = 0; i < bytes_; ++i) pattern[i] = uint8_t(salt ^ (i * 31 + (i >> 9) * 7));
    deliver(from.data(), to.data(), from.size(), kRecord, true);
    flush();
    device_->driver()->read(seen.data(), memory_.address(), bytes_);
    if (seen != pattern) throw DeviceError("what is stored through the BAR is not what the device holds");
    device_->gdr().read(pinned_, seen.data(), mapping_, bytes_);
    if (seen != pattern) throw DeviceError("what is stored through the BAR is not what is read there");
  }
} catch (const DeviceError& error) {
  throw error_of(error);
}

}  // namespace headgate
