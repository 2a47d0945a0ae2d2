// Lets one call of the control plane at a time change a worker.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace headgate {

// For std::unique_lock with a timeout. Unlike std::timed_mutex it is one that ThreadSanitizer can follow.
class Control {
 public:
  bool try_lock_for(std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!free_.wait_for(lock, timeout, [this] { return !taken_; })) return false;
    return taken_ = true;
  }
  void unlock() {
    std::lock_guard lock(mutex_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

}  // namespace headgate
