// Records on their way into a window: each is asked for when it is put, and copied when some more have been put.
// Finding the next ones meanwhile is the time that memory takes to answer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "store/gather.h"
#include "store/window.h"

namespace headgate {

class RecordPipe {
 public:
  RecordPipe(Window& window, uint32_t bytes, bool past_caches)
      : window_(window),
        bytes_(bytes),
        at_once_(std::clamp(kBatchBytes / bytes, 1u, kRecordsAtOnce)),
        past_caches_(past_caches) {}

  // `from` stays as it is until finish().
  void put(const uint8_t* from, uint64_t to) {
    prefetch_record(from, bytes_);
    Batch& batch = batches_[filling_];
    batch.from[batch.count] = from;
    batch.to[batch.count++] = to;
    if (batch.count == at_once_) turn();
  }
  void finish() { turn(), turn(); }

 private:
  static constexpr uint32_t kBatchBytes = 16 << 10;  // two of them fit a first cache
  static constexpr uint32_t kRecordsAtOnce = 64;

  struct Batch {
    uint32_t count = 0;
    const uint8_t* from[kRecordsAtOnce];
    uint64_t to[kRecordsAtOnce];
  };

  // Delivers the batch that was filled before this one, and fills it next.
  void turn() {
    filling_ ^= 1;
    Batch& batch = batches_[filling_];
    if (batch.count > 0) window_.deliver(batch.from, batch.to, batch.count, bytes_, past_caches_);
    batch.count = 0;
  }

  Window& window_;
  const uint32_t bytes_, at_once_;
  const bool past_caches_;
  uint32_t filling_ = 0;
  Batch batches_[2];
};

}  // namespace headgate
