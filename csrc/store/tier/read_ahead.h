// Background reads of extents that are likely to be wanted: hints of bounded memory, behind every other read, never
// evicting warmer ones.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "store/gather_path.h"

namespace headgate {

struct AheadExtent {
  uint32_t extent;
  uint16_t blocks;  // of it, as bits
};

struct AheadJob {
  std::shared_ptr<PackFile> pack;
  std::vector<AheadExtent> extents;  // the most important first
  size_t next = 0;
};

// Used by one copy thread. Blocks are claimed only when there is room to submit their read at once.
class ReadAhead {
 public:
  ReadAhead(Frames& frames, GatherPath& path, IoEngine& io, Counters& counters)
      : frames_(frames), path_(path), io_(io), counters_(counters), depth_(std::max(1u, io.depth() / 4)) {}

  // Dropped and counted when the owner has hinted more than it may, or memory is missing.
  void add(uint32_t owner, AheadJob job);
  // What a worker expects to want in its next steps: before all else, but only while the disk reads for nobody who
  // waits; colder, and soon too late. So the oldest are dropped for the newest, and counted.
  void promote(uint32_t owner, AheadJob job);
  // Queues a few reads, owner by owner; true if any.
  bool pump();
  void landed(const Io& io, int error);
  // Forgets what is still to be read of a pack for one owner, the first from `next_owner` on; true when that was the
  // last one. `next_owner` moves on.
  bool forget(const PackFile* pack, uint64_t& next_owner);
  // Forgets what an owner has hinted.
  void forget_owner(uint32_t owner) { hints_.erase(owner); }

 private:
  static constexpr uint64_t kBytesMax = 4 << 20;  // per owner
  static constexpr size_t kJobsMax = 4096;        // per owner: all of them are forgotten at once
  static constexpr uint32_t kAtOnce = 8;
  static constexpr uint64_t kPromotedMax = 1024;  // extents, per owner; no job has more
  // Turns of the tier's order that an unused extent survives.
  static constexpr uint8_t kWeight = 3, kPromotedWeight = 1;

  struct Hints {
    std::deque<AheadJob> jobs;
    uint64_t bytes = 0;
    std::deque<AheadJob> promoted;
    uint64_t extents = 0;  // of these

    bool empty() const { return jobs.empty() && promoted.empty(); }
  };
  static uint64_t bytes_of(const AheadJob& job) { return sizeof job + job.extents.size() * sizeof(AheadExtent); }
  bool demanded() const { return io_.depth() - io_.room() > in_flight_; }
  void pop(Hints& hints);
  void pop_promoted(Hints& hints);

  Frames& frames_;
  GatherPath& path_;
  IoEngine& io_;
  Counters& counters_;
  const uint32_t depth_;
  uint32_t in_flight_ = 0;
  uint32_t last_owner_ = 0;
  std::map<uint32_t, Hints> hints_;  // by owner
};

}  // namespace headgate
