// Sleeping on several futex words at once.
#pragma once

#include <array>
#include <cerrno>

#include "ring/futex.h"
#include "ring/word.h"

namespace headgate {

// The words a thread sleeps on, each with the value it had when the thread last looked.
class Bells {
 public:
  void clear() { words_ = 0; }
  void add(const uint32_t& word) {
    if (words_++ >= waiters_.size()) return;
    futex_waitv& w = waiters_[words_ - 1] = {};
    w.val = as_atomic(word).load(std::memory_order_relaxed);
    w.uaddr = reinterpret_cast<uint64_t>(&word);
    w.flags = FUTEX_32;  // shared with other processes
  }

  // Returns when a word differs from its value, on a wake, at the deadline, or for no reason. Without futex_waitv, and
  // beyond its limit of 128 words, only the first words wake; the others are noticed within a millisecond.
  void wait(uint64_t deadline_ns) {
    uint64_t poll_ns = now_ns() + kPollNs;
    size_t count = words_ < waiters_.size() ? words_ : waiters_.size();
    if (count < words_ && poll_ns < deadline_ns) deadline_ns = poll_ns;
    timespec deadline = to_timespec(deadline_ns);
    if (syscall(SYS_futex_waitv, waiters_.data(), count, 0, &deadline, CLOCK_MONOTONIC) >= 0) return;
    if (errno != ENOSYS && errno != EPERM) return;
    auto& first = *reinterpret_cast<const uint32_t*>(waiters_[0].uaddr);
    futex_wait(first, uint32_t(waiters_[0].val), poll_ns < deadline_ns ? poll_ns : deadline_ns);
  }

 private:
  static constexpr uint64_t kPollNs = 1'000'000;
  std::array<futex_waitv, FUTEX_WAITV_MAX> waiters_{};
  size_t words_ = 0;
};

}  // namespace headgate
