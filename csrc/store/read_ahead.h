// Background reads of extents that are likely to be wanted: bounded, behind every other read, never evicting warmer
// ones.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "store/gather_path.h"

namespace headgate {

struct AheadJob {
  std::shared_ptr<PackFile> pack;
  std::vector<uint32_t> extents;  // the most important first
  size_t next = 0;
};

// Used by one copy thread.
class ReadAhead {
 public:
  ReadAhead(Frames& frames, GatherPath& path, Counters& counters, uint32_t depth)
      : frames_(frames), path_(path), counters_(counters), depth_(depth) {}

  // False when too many jobs wait.
  bool add(AheadJob job);
  // Queues as many reads as fit.
  void pump();
  void landed(const Io& io, int error);
  // Forgets what is still to be read of a pack.
  void forget(const PackFile* pack);
  bool idle() const { return jobs_.empty(); }

 private:
  static constexpr size_t kJobsMax = 1024;
  static constexpr uint8_t kWeight = 3;  // passes of the clock's hand that an unused extent survives

  Frames& frames_;
  GatherPath& path_;
  Counters& counters_;
  const uint32_t depth_;
  uint32_t in_flight_ = 0;
  std::deque<AheadJob> jobs_;
};

}  // namespace headgate
