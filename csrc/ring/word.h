// The words that both sides of a ring look at: plain in core/ring.h, atomic wherever the host touches them.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace headgate {

// Also of a word that this side maps read-only, for loads.
template <typename T>
std::atomic_ref<T> as_atomic(const T& word) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  return std::atomic_ref<T>(const_cast<T&>(word));
}

// Where this thread runs, as the word of a ring says it: from 1; 0 is unknown.
inline uint32_t this_cpu() { return uint32_t(sched_getcpu() + 1); }

}  // namespace headgate
