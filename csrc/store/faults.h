// What a test build (HEADGATE_IO_SHIM) does to the copy threads: they stand still, runs begin late, out of order or
// fail, allocations fail. Otherwise this is nothing.
#pragma once

#include <cstdint>

#ifdef HEADGATE_IO_SHIM
#include "shim/alloc_shim.h"
#include "shim/copy_shim.h"
#else

namespace headgate::shim {

inline void copy_thread_begins() {}
constexpr bool stops(uint32_t) { return false; }
inline void dawdle() {}

struct TicketFaults {
  void begin(uint32_t) {}
  static constexpr uint32_t run(uint32_t number, uint32_t) { return number; }
};

struct RunFaults {
  static constexpr uint32_t begin(uint32_t records) { return records; }
  static constexpr bool fails() { return false; }
};

template <typename List>
struct HeldRuns {
  template <typename Task>
  static constexpr bool hold(Task&, uint64_t) {
    return false;
  }
  template <typename Ready>
  void let_go(uint64_t, Ready) {}
};

}  // namespace headgate::shim

#endif
