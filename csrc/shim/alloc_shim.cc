#include "shim/alloc_shim.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace headgate::shim {
namespace {

std::atomic<uint64_t> counted{0}, first{0}, count{0};
std::atomic<bool> unexpected{false};
thread_local bool copy_thread = false;

void look() {
  if (!copy_thread) return;
  uint64_t number = ++counted;
  if (first == 0 || number < first || number - first >= count) return;
  if (unexpected) throw std::logic_error("injected");
  throw std::bad_alloc();
}

}  // namespace

void fail_allocations(uint64_t nth, uint64_t times, bool strange) {
  first = 0;
  counted = 0;
  count = times;
  unexpected = strange;
  first = nth;
}

uint64_t allocations() { return counted; }

void copy_thread_begins() { copy_thread = true; }

}  // namespace headgate::shim

// The module's own, all of which go by malloc. A sanitizer has one for the whole process: then nothing fails.
#ifndef HEADGATE_SANITIZED
void* operator new(size_t bytes) {
  headgate::shim::look();
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif
