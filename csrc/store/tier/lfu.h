// The extents that are used most often, whether they are held or not: counts outlive what they count, and fade.
#pragma once

#include "store/tier/queues.h"

namespace headgate {

// The victim is the least used of a new frame and of the held ones that come next: a new one stays only if it is used
// more often than one of those.
//
// What a run lacks comes together, and cannot go before the run has had it. So some frames stay new until more have
// come: one more each time that no new one can go, and a held one has to, one less in so many victims. Of more than
// these two are looked at, and the one that does not go is held.
//
// Counts fade by rounds, an owner's own: as many of its uses, and frames taken by anybody, as there are frames. So what
// a neighbour uses fades nothing, and what it reads, at the cost of its share of the disk, no more than others' reads.
//
// A use leaves a mark, a byte that is likely to be cached. Marks are counted, as uses of that moment, when their frame
// is looked at or leaves: once in a round or so, as long as one use in eight is a miss.
class Lfu final : public Queues {
 public:
  explicit Lfu(uint32_t frames);

  void admit(uint32_t frame, uint64_t key, uint8_t weight, Domain& own, Domain* common) override;
  void use(std::span<const uint32_t> frames) override {
    for (uint32_t frame : frames) frames_[frame].uses += frames_[frame].uses < UINT8_MAX;
  }
  void weigh(uint32_t frame, uint8_t weight) override {
    Held& held = counted(frame);
    settle(held);
    held.weight = std::max(held.weight, weight);
  }
  void remove(uint32_t frame) override;

  std::optional<uint32_t> victim(Domain& domain, const Evictable& evictable, uint64_t looks) override;
  std::optional<uint32_t> coldest(Domain& domain, const Evictable& evictable, uint8_t weight) override;

 private:
  enum : uint32_t { kHeld, kNew };
  static constexpr uint32_t kSample = 8;
  static constexpr uint32_t kStay = 64;
  static constexpr uint16_t kUse = 64;
  // More would take longer to forget than it tells apart.
  static constexpr uint16_t kUsesMax = 16 * kUse;
  static constexpr uint32_t kHalf = 32;  // rounds in which counts lose half
  // Uses times rounds without a use beyond which a count is ignored: what goes on being used as often hardly waits so.
  static constexpr uint32_t kOverdue = 256 * kUse;
  static constexpr uint32_t kGhostsPerFrame = 2;
  static constexpr uint32_t kWays = 4;  // places of a ghost, in one cache line

  struct Held {
    uint64_t key = 0;  // mixed
    Domain* own = nullptr;
    uint32_t since = 0;  // the round in which uses and weight were such
    uint16_t uses = 0;   // kUse each; those that are counted
    uint8_t weight = 0;
  };
  // The count of an extent that left.
  struct Ghost {
    uint32_t tag = 0;
    uint32_t owner = 0;  // 0: the place is free
    uint32_t since = 0;
    uint16_t uses = 0;
  };

  uint32_t round(const Domain& own) const { return uint32_t((own.uses + admitted_) >> round_shift_); }
  static uint16_t faded(uint32_t uses, uint32_t rounds) {
    return rounds < kHalf * 16 ? uint16_t((uses * (2 * kHalf - rounds % kHalf) / (2 * kHalf)) >> rounds / kHalf) : 0;
  }
  void settle(Held& held) const;
  Held& counted(uint32_t frame, uint32_t most = UINT32_MAX);
  uint32_t rank(uint32_t frame);
  bool cold_now(uint32_t frame, uint8_t weight);
  std::span<Ghost, kWays> ghosts(uint64_t key) {
    return std::span<Ghost, kWays>(&ghosts_[(key & (ghosts_.size() / kWays - 1)) * kWays], kWays);
  }
  static uint32_t tag(uint64_t key) { return uint32_t(key >> 32); }
  static Ghost& least_of_most(std::span<Ghost, kWays> line, uint32_t owner);
  static bool fewer(const Ghost& a, const Ghost& b);

  std::vector<Held> held_;     // by frame
  std::vector<Ghost> ghosts_;  // by key
  const int round_shift_;
  uint64_t admitted_ = 0;
  uint32_t owners_ = 0;
};

}  // namespace headgate
