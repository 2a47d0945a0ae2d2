#include "store/tier/read_ahead.h"

#include <algorithm>
#include <new>

namespace headgate {

void ReadAhead::add(uint32_t owner, AheadJob job) {
  if (job.extents.empty()) return;
  const uint64_t bytes = bytes_of(job);
  try {
    Hints& hints = hints_[owner];
    if (hints.bytes + bytes <= kBytesMax && hints.jobs.size() < kJobsMax) {
      hints.jobs.push_back(std::move(job));
      hints.bytes += bytes;
      return;
    }
  } catch (const std::bad_alloc&) {
  }
  headgate::add(counters_.hints_dropped);
}

void ReadAhead::promote(uint32_t owner, AheadJob job) {
  if (job.extents.empty()) return;
  const size_t extents = job.extents.size();
  try {
    Hints& hints = hints_[owner];
    hints.promoted.push_back(std::move(job));
    hints.extents += extents;
    for (; hints.extents > kPromotedMax; headgate::add(counters_.promotes_dropped)) pop_promoted(hints);
  } catch (const std::bad_alloc&) {
    headgate::add(counters_.hints_dropped);
  }
}

bool ReadAhead::pump() {
  bool any = false;
  for (uint32_t tried = 0; tried < kAtOnce && in_flight_ < depth_ && io_.room() > 0 && !hints_.empty(); ++tried) {
    auto next = hints_.upper_bound(last_owner_);
    if (next == hints_.end()) next = hints_.begin();
    last_owner_ = next->first;
    if (next->second.empty()) {
      hints_.erase(next);
      continue;
    }
    Hints& hints = next->second;
    const bool promoted = !hints.promoted.empty() && !demanded();
    if (!promoted && hints.jobs.empty()) continue;
    any = true;
    AheadJob& job = promoted ? hints.promoted.front() : hints.jobs.front();
    const AheadExtent wanted = job.extents[job.next++];
    ExtentUse use{job.pack.get(), wanted.extent, kNoFrame, 0, 0, wanted.blocks, 0, false};
    Frames::Ahead result = frames_.acquire_ahead(use, promoted ? kPromotedWeight : kWeight);
    if (result == Frames::Ahead::kRead) in_flight_ += path_.read_ahead(use);
    const bool rest_is_colder = result == Frames::Ahead::kFull;  // than everything held
    if (rest_is_colder && promoted) headgate::add(counters_.promotes_dropped);
    if (rest_is_colder || job.next == job.extents.size()) promoted ? pop_promoted(hints) : pop(hints);
    if (hints.empty()) hints_.erase(next);
  }
  return any;
}

void ReadAhead::pop(Hints& hints) {
  hints.bytes -= bytes_of(hints.jobs.front());
  hints.jobs.pop_front();
}

void ReadAhead::pop_promoted(Hints& hints) {
  hints.extents -= hints.promoted.front().extents.size();
  hints.promoted.pop_front();
}

void ReadAhead::landed(const Io& io, int error) {
  --in_flight_;
  if (error == 0) headgate::add(counters_.warm_bytes, io.bytes);
}

bool ReadAhead::forget(const PackFile* pack, uint64_t& next_owner) {
  auto at = next_owner <= UINT32_MAX ? hints_.lower_bound(uint32_t(next_owner)) : hints_.end();
  if (at == hints_.end()) return true;
  next_owner = uint64_t{at->first} + 1;
  Hints& hints = at->second;
  std::erase_if(hints.jobs, [&](const AheadJob& job) {
    if (job.pack.get() != pack) return false;
    hints.bytes -= bytes_of(job);
    return true;
  });
  std::erase_if(hints.promoted, [&](const AheadJob& job) {
    if (job.pack.get() != pack) return false;
    hints.extents -= job.extents.size();
    return true;
  });
  return false;
}

}  // namespace headgate
