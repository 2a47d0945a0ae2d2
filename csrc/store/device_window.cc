#include "store/device_window.h"

#include <vector>

#include "core/probe.h"

namespace headgate {

Error error_of(const DeviceError& error) {
  return {error.out_of_memory ? "RESOURCE_EXHAUSTED" : "FAILED_PRECONDITION", error.what()};
}

void require_attributes(const CudaDriver& driver,
                        std::initializer_list<std::pair<cuda::Attribute, const char*>> attributes) {
  for (auto [attribute, name] : attributes)
    if (driver.attribute(attribute) == 0) throw DeviceError(std::string("the device has no ") + name);
}

DeviceWindow::DeviceWindow(std::shared_ptr<CudaDriver> driver, uint64_t bytes, bool for_rdma)
    : bytes_(bytes), memory_(std::make_unique<DeviceMemory>(std::move(driver), bytes, for_rdma)) {}

bool DeviceWindow::fence() try {
  if (broken()) return false;
  flush();
  return true;
} catch (const DeviceError&) {
  set_broken();
  return false;
}

bool DeviceWindow::read(uint64_t from, uint8_t* to, uint64_t bytes) try {
  if (broken()) return false;
  read_back(from, to, bytes);
  return true;
} catch (const DeviceError&) {
  set_broken();
  return false;
}

void DeviceWindow::self_test() try {
  constexpr uint32_t kRecord = 512;
  std::vector<uint8_t> pattern(bytes_ / kRecord * kRecord), seen(pattern.size());
  std::vector<const uint8_t*> from;
  std::vector<uint64_t> to;
  for (uint64_t at = 0; at < pattern.size(); at += kRecord) from.push_back(&pattern[at]), to.push_back(at);
  for (uint32_t seed : {0x5a5a5a5au, 0xa5a5a5a5u}) {
    for (uint64_t line = 0; line < pattern.size() / kProbeBytes; ++line)
      probe_line(seed, line, reinterpret_cast<uint32_t*>(&pattern[line * kProbeBytes]));
    deliver(from.data(), to.data(), from.size(), kRecord, true);
    flush();
    driver().read(seen.data(), memory_->address(), seen.size());
    if (seen != pattern) throw DeviceError("what is delivered is not what the device holds");
    read_back(0, seen.data(), seen.size());
    if (seen != pattern) throw DeviceError("what is delivered is not what is read back");
  }
} catch (const DeviceError& error) {
  throw error_of(error);
}

}  // namespace headgate
