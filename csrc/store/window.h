// The memory of one worker that selected records are copied into. Here: a memfd shared with the worker.
#pragma once

#include "store/mapping.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#else
#include <atomic>
#endif

namespace headgate {

class Window {
 public:
  Window(int fd, uint64_t bytes) : memory_(fd, bytes, PROT_READ | PROT_WRITE, "window") {}
  uint8_t* base() const { return memory_.data(); }
  uint64_t bytes() const { return memory_.bytes(); }

  // Orders every store into the window before the completion that follows.
  void fence() const {
#if defined(__x86_64__)
    _mm_sfence();
#else
    std::atomic_thread_fence(std::memory_order_release);
#endif
  }

 private:
  Mapping memory_;
};

}  // namespace headgate
