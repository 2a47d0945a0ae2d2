// Sleeping on a word that another process writes: shared futexes with an absolute CLOCK_MONOTONIC deadline.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>

namespace headgate {

inline uint64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return uint64_t(ts.tv_sec) * 1'000'000'000 + uint64_t(ts.tv_nsec);
}

inline timespec to_timespec(uint64_t ns) { return {time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)}; }

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns when `word` differs from `seen`, on a wake, at the deadline, or for no reason.
inline void futex_wait(const uint32_t& word, uint32_t seen, uint64_t deadline_ns) {
  timespec deadline = to_timespec(deadline_ns);
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
}

// Wakes one sleeper: each word has one, and a peer that made a hundred thousand of them would hold up who wakes all.
inline void futex_wake(const uint32_t& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1); }

}  // namespace headgate
