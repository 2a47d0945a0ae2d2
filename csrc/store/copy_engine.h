// One copy thread: its loop, and how other threads ask it for something. See `loop`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "store/moves.h"
#include "store/ring_service.h"

namespace headgate {

struct EngineOptions {
  uint32_t thread;  // its number
  uint32_t io_depth;
  uint32_t spin_us;
  uint64_t bulk_bytes_max;  // in flight
  uint32_t through_blocks;  // read through rather than make a second request
};

// A ring and its runs belong to one engine, and a command that runs between steps sees no copy half done: what
// csrc/protocol asks of slot epochs and counts in flight needs no atomics here. What must hold for all rings of a
// worker holds when the command has run on every engine that serves one.
class CopyEngine {
 public:
  // Returns whether it is done; otherwise it is called again, after some turns of the loop.
  using Command = std::function<bool(RingService&)>;

  // `alarm` makes every engine look around.
  CopyEngine(EngineOptions options, Frames& frames, Counters& counters, Trace& trace, std::function<void()> alarm);
  ~CopyEngine();

  // Runs `command` on the thread, between steps, until it is done; passes on what it throws. UNAVAILABLE once stopped,
  // and after 5 s: from then on it is not called any more. Commands wait for nothing, and each call of one is short.
  void call(const Command& command);
  // The same on several threads at once, within the same time; passes on the last error when all have ended, and
  // leaves in `touched` on how many it was carried out, all or in part.
  static void call(std::span<CopyEngine* const> engines, const Command& command, size_t& touched);
  // Poisons every ring, waits some seconds for the I/O in flight, ends the thread. Idempotent.
  void stop();
  // Makes the thread look around.
  void nudge();

 private:
  enum class State : uint8_t { kWaiting, kRunning, kPaused, kDone };
  struct Call {
    const Command* command;  // valid until it is done, failed or taken back
    std::chrono::steady_clock::time_point deadline;
    State state = State::kWaiting;
    std::exception_ptr error;
  };

  std::shared_ptr<Call> post(const Command& command);
  void wait(const std::shared_ptr<Call>& call);

  void loop();
  bool turn();
  bool run_commands();
  void wait_for_work(bool worked);
  bool in_the_way(uint64_t now);
  static bool move_from(uint32_t cpu);
  void sleep();
  bool anything_to_take() const;
  bool a_device_steps(uint64_t now) const;
  void drain();

  const EngineOptions options_;
  Counters& counters_;
  RingService service_;
  uint64_t last_work_ns_ = 0;
  Moves moves_;

  mutable std::mutex mutex_;
  std::condition_variable call_done_;
  std::list<std::shared_ptr<Call>> calls_;
  bool accepts_calls_ = true;
  std::atomic<bool> asked_{false};  // there may be commands
  std::atomic<bool> stopping_{false};
  uint32_t command_word_ = 0;  // a futex
  std::thread thread_;         // last: starts when everything else is there
};

}  // namespace headgate
