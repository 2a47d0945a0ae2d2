// The way of one thread into a device's memory by copies of the driver: what it puts is gathered in pinned memory of
// fixed size and sent in batches, one while the next is gathered.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/cuda_driver.h"
#include "gpu/undo.h"

namespace headgate {

// How long copies to a device are waited for by threads that have others to serve. One that stands still is waited for
// once: until a copy there has ended again, the next ones get the time of a slow copy.
class Patience {
 public:
  uint64_t ns() const { return ns_.load(std::memory_order_relaxed); }
  void lose() { ns_.store(kLostNs, std::memory_order_relaxed); }
  void regain() {
    if (ns() != kNs) ns_.store(kNs, std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kNs = 200'000'000, kLostNs = 1'000'000;
  std::atomic<uint64_t> ns_{kNs};
};

// Used by one thread at a time. Throws DeviceError, also for copies that do not end in time: what of them arrives, and
// when, nobody knows then.
class CopyLane {
 public:
  static constexpr uint64_t kBatchBytes = 256 << 10;
  static constexpr uint32_t kBatches = 2;
  static constexpr uint64_t kBytes = kBatches * kBatchBytes;  // pinned

  // It goes when it is at rest.
  CopyLane(std::shared_ptr<CudaDriver> driver, std::shared_ptr<Patience> patience);

  // Records of `bytes` bytes, at most kBatchBytes, to base + to[i]. The sources are free again when it returns; pieces
  // that lie behind one another travel as one.
  void put(const uint8_t* const* from, cuda::Pointer base, const uint64_t* to, size_t count, uint32_t bytes);
  // All that was put has arrived when it returns.
  void finish();
  // What the device holds; at most kBatchBytes, behind a `finish`.
  void read(uint8_t* to, cuda::Pointer from, uint64_t bytes);
  // Waits until nothing is under way; false if that is not known in time.
  bool at_rest() noexcept;
  // The same without waiting.
  bool has_ended() noexcept;

 private:
  // Its memory, filled up to `filled`, and a stream: what has been sent of it has ended when the stream has.
  struct Batch {
    uint8_t* memory = nullptr;
    cuda::Stream stream = nullptr;
    uint64_t filled = 0;
    bool under_way = false;
    std::vector<cuda::Pointer> from, to;
    std::vector<size_t> bytes;
  };

  Batch& batch() { return batches_[current_]; }
  void add(Batch& batch, cuda::Pointer to, uint64_t from, uint32_t bytes);
  void send();
  void await(Batch& batch);

  const std::shared_ptr<CudaDriver> driver_;
  const std::shared_ptr<Patience> patience_;
  std::array<Batch, kBatches> batches_;
  uint32_t current_ = 0;
  Undo undo_;  // last: its steps need the others
};

}  // namespace headgate
