#include "cpu/level.h"

#include <atomic>
#include <stdexcept>

namespace headgate {
namespace {

Level best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Level::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Level::kAvx2;
#endif
  return Level::kBaseline;
}

const Level kBest = best();
std::atomic<Level> current{kBest};

}  // namespace

Level level() { return current.load(std::memory_order_relaxed); }

bool has_vpopcnt() {
#if defined(__x86_64__)
  static const bool present = __builtin_cpu_supports("avx512vpopcntdq");
  return present;
#else
  return false;
#endif
}

std::vector<Level> levels() {
  std::vector<Level> all;
  for (int i = 0; i <= static_cast<int>(kBest); ++i) all.push_back(static_cast<Level>(i));
  return all;
}

void set_level(Level wanted) {
  if (wanted < Level::kBaseline || wanted > kBest)
    throw std::invalid_argument("this machine lacks that instruction set");
  current.store(wanted, std::memory_order_relaxed);
}

}  // namespace headgate
