#include "store/pull_window.h"

namespace headgate {

PullWindow::PullWindow(int fd, uint64_t bytes)
    : ShmWindow(fd, PullLayout{bytes}.memory_bytes()),
      lines_(reinterpret_cast<uint32_t*>(data() + PullLayout{bytes}.lines_off())) {}

void PullWindow::deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes,
                         bool past_caches) {
  ShmWindow::deliver(from, to, count, bytes, past_caches);
  for (size_t i = 0; i < count; ++i) lines_[to[i] / kPullLineBytes] = 0;
}

void PullWindow::name(const uint64_t* to, const uint64_t* at, size_t count) {
  for (size_t i = 0; i < count; ++i) lines_[to[i] / kPullLineBytes] = uint32_t(at[i] / kPullLineBytes) + 1;
}

}  // namespace headgate
