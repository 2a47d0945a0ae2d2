// The shim of test builds, for memory: which allocation of the copy threads fails. Included by store/faults.h only.
#pragma once

#include <cstdint>

namespace headgate::shim {

// From now on allocations [nth, nth + times) of the copy threads, counted together from 1, throw std::bad_alloc, or
// with `strange` something that nobody expects. 0: none.
void fail_allocations(uint64_t nth, uint64_t times, bool strange);
// How many there were since then.
uint64_t allocations();

// Allocations of the calling thread count.
void copy_thread_begins();

}  // namespace headgate::shim
