#include "shim/late_window.h"

#include <cstring>

namespace headgate::shim {

void LateWindow::deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < count; ++i) held_.push_back({to[i], {from[i], from[i] + bytes}});
}

bool LateWindow::fence() {
  std::lock_guard lock(mutex_);
  for (const Record& record : held_) std::memcpy(memory_.data() + record.to, record.bytes.data(), record.bytes.size());
  held_.clear();
  return true;
}

}  // namespace headgate::shim
