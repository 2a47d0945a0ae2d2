#include "store/shm_window.h"

#include <atomic>
#include <cstring>

#include "store/gather.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace headgate {

void ShmWindow::deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes,
                        bool past_caches) {
  copy_records(from, memory_.data(), to, count, bytes, past_caches);
}

// Stores that bypass the caches do not obey the release order of a cell.
bool ShmWindow::fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
  return true;
}

bool ShmWindow::read(uint64_t from, uint8_t* to, uint64_t bytes) {
  std::memcpy(to, memory_.data() + from, bytes);
  return true;
}

}  // namespace headgate
