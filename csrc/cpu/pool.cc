#include "cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace headgate {
namespace {

constexpr auto kSpin = std::chrono::microseconds(30);
constexpr int kSpinsPerClock = 64;
constexpr int kThreadsMax = 256;
constexpr int kClosed = -1;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// True once `done()` is; false if it was not within kSpin.
template <class Done>
bool spin_until(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

class Pool {
 public:
  void run(int count, int threads, const std::function<void(int)>& task) {
    std::unique_lock lock(busy_, std::try_to_lock);
    if (!lock) return run_alone(count, task);
    grow(threads - 1);
    task_ = &task;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    helpers_.store(threads - 1, std::memory_order_relaxed);
    inside_.store(0, std::memory_order_release);
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    take_tasks();
    close();
  }

  static void run_alone(int count, const std::function<void(int)>& task) {
    for (int i = 0; i < count; ++i) task(i);
  }

 private:
  void grow(int helpers) {
    for (; started_ < std::min(helpers, kThreadsMax); ++started_) std::thread([this] { serve(); }).detach();
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      auto posted = [&] { return jobs_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(posted)) jobs_.wait(seen, std::memory_order_acquire);
      seen = jobs_.load(std::memory_order_acquire);
      if (!enter()) continue;
      take_tasks();
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  // A thread that wakes late finds the job closed, so the caller never waits for a sleeper.
  bool enter() {
    int inside = inside_.load(std::memory_order_acquire);
    while (inside != kClosed && inside < helpers_.load(std::memory_order_relaxed)) {
      if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void take_tasks() {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) (*task_)(i);
  }

  void close() {
    auto empty = [&] {
      int none = 0;
      return inside_.compare_exchange_strong(none, kClosed, std::memory_order_acquire);
    };
    while (!spin_until(empty)) std::this_thread::yield();
  }

  std::mutex busy_;
  int started_ = 0;
  const std::function<void(int)>* task_ = nullptr;
  int count_ = 0;
  alignas(64) std::atomic<int> next_{0};
  std::atomic<int> helpers_{0};
  alignas(64) std::atomic<int> inside_{kClosed};
  alignas(64) std::atomic<uint32_t> jobs_{0};
};

}  // namespace

void run_tasks(int count, int threads, const std::function<void(int)>& task) {
  if (threads <= 1 || count <= 1) return Pool::run_alone(count, task);
  // Never destroyed: its detached threads may outlive static destruction.
  static Pool& pool = *new Pool;
  pool.run(count, std::min(threads, count), task);
}

}  // namespace headgate
