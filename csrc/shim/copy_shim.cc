#include "shim/copy_shim.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

namespace headgate::shim {
namespace {

std::atomic<uint64_t> stopped{0};  // copy threads, a bit each
std::atomic<uint32_t> delay_us{0}, fail_every{0}, dawdle_us{0};
std::atomic<bool> delay_random{false}, reorder{false};
std::atomic<uint64_t> runs_seen{0}, random_state{0};

// splitmix64: one atomic step per number, the same sequence for the same seed
uint64_t next_random() {
  uint64_t z = random_state.fetch_add(0x9e3779b97f4a7c15) + 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

}  // namespace

void set_copy_rules(const CopyRules& rules) {
  delay_us = rules.delay_us;
  delay_random = rules.delay_random;
  fail_every = rules.fail_every;
  reorder = rules.reorder;
  dawdle_us = rules.dawdle_us;
  random_state = rules.seed;
  runs_seen = 0;
  stopped = !rules.stopped ? 0 : rules.only_thread < 0 ? UINT64_MAX : uint64_t{1} << (rules.only_thread % 64);
}

bool stops(uint32_t thread) { return stopped >> thread & 1; }

void dawdle() {
  if (const uint32_t most = dawdle_us; most > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(next_random() % (uint64_t{most} + 1)));
}

void TicketFaults::begin(uint32_t run_count) {
  first_ = 0, step_ = 1;
  if (!reorder || run_count < 2) return;
  first_ = uint32_t(next_random() % run_count);
  step_ = uint32_t(1 + next_random() % (run_count - 1));
  while (std::gcd(step_, run_count) != 1) --step_;
}

uint32_t RunFaults::begin(uint32_t records) {
  uint64_t number = ++runs_seen;
  uint32_t every = fail_every;
  fails_ = every > 0 && number % every == 0;
  uint64_t us = delay_us;
  if (us > 0 && delay_random) us = next_random() % (us + 1);
  delay_ns_ = us * 1000;
  return fails_ ? records / 2 : records;
}

}  // namespace headgate::shim
