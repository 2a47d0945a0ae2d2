#include "store/read_ahead.h"

#include <algorithm>

namespace headgate {

void ReadAhead::add(uint32_t owner, AheadJob job) {
  if (job.extents.empty()) return;
  auto found = hints_.find(owner);
  uint64_t held = found == hints_.end() ? 0 : found->second.bytes;
  if (held + bytes_of(job) > kBytesMax) return headgate::add(counters_.hints_dropped);
  Hints& hints = hints_[owner];
  hints.bytes += bytes_of(job);
  hints.jobs.push_back(std::move(job));
}

bool ReadAhead::pump() {
  uint32_t tried = 0;
  for (; tried < kAtOnce && in_flight_ < depth_ && io_.room() > 0 && !hints_.empty(); ++tried) {
    auto next = hints_.upper_bound(last_owner_);
    if (next == hints_.end()) next = hints_.begin();
    last_owner_ = next->first;
    AheadJob& job = next->second.jobs.front();
    uint32_t extent = job.extents[job.next++];
    ExtentUse use{job.pack.get(), extent, kNoFrame, 0, 0, job.pack->extent_mask(extent), 0, false};
    Frames::Ahead result = frames_.acquire_ahead(use, kWeight);
    if (result == Frames::Ahead::kRead) in_flight_ += path_.read(use, nullptr);
    bool rest_is_colder = result == Frames::Ahead::kFull;  // than everything held
    if (rest_is_colder || job.next == job.extents.size()) pop(next->second);
    if (next->second.jobs.empty()) hints_.erase(next);
  }
  return tried > 0;
}

void ReadAhead::pop(Hints& hints) {
  hints.bytes -= bytes_of(hints.jobs.front());
  hints.jobs.pop_front();
}

void ReadAhead::landed(const Io& io, int error) {
  --in_flight_;
  if (error == 0) headgate::add(counters_.warm_bytes, io.bytes);
}

void ReadAhead::forget(const PackFile* pack) {
  for (auto at = hints_.begin(); at != hints_.end();) {
    Hints& hints = at->second;
    std::erase_if(hints.jobs, [&](const AheadJob& job) {
      if (job.pack.get() != pack) return false;
      hints.bytes -= bytes_of(job);
      return true;
    });
    at = hints.jobs.empty() ? hints_.erase(at) : std::next(at);
  }
}

}  // namespace headgate
