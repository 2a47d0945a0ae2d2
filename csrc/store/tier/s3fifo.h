// S3-FIFO (Yang et al., SOSP 2023): what comes new waits in a small queue, and only what is used again there, or comes
// again soon after it left, enters the main one.
#pragma once

#include "store/tier/queues.h"

namespace headgate {

class S3Fifo final : public Queues {
 public:
  explicit S3Fifo(uint32_t frames);

  void admit(uint32_t frame, uint64_t key, uint8_t weight, Domain& own, Domain* common) override;
  void use(std::span<const uint32_t> frames) override {
    for (uint32_t frame : frames) frames_[frame].uses += frames_[frame].uses < kUsesMax;
  }
  std::optional<uint32_t> victim(Domain& domain, const Evictable& evictable, uint64_t looks) override;
  std::optional<uint32_t> coldest(Domain& domain, const Evictable& evictable, uint8_t weight) override;

 private:
  enum : uint32_t { kSmall, kMain };
  static constexpr uint8_t kUsesMax = 3;
  static constexpr uint32_t kSmallPart = 10;  // the small queue is a tenth of its domain

  // One that left from a small queue.
  struct Ghost {
    uint32_t tag = 0;
    uint32_t number = 0;  // of its leaving
  };
  uint32_t queue_for(const Domain& domain, uint64_t key, uint8_t weight);
  void leave_for_good(uint32_t frame);
  void enter_main(Domain& domain, uint32_t frame);
  Ghost& ghost(uint64_t key) { return ghosts_[key & (ghosts_.size() - 1)]; }
  static uint32_t tag(uint64_t key) { return uint32_t(key >> 32); }

  std::vector<uint64_t> keys_;  // by frame
  std::vector<Ghost> ghosts_;   // by key
  uint32_t left_ = 0;           // ghosts made
};

}  // namespace headgate
