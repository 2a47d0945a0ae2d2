#include "store/read_ahead.h"

#include <algorithm>

namespace headgate {

bool ReadAhead::add(AheadJob job) {
  if (jobs_.size() >= kJobsMax) return false;
  jobs_.push_back(std::move(job));
  return true;
}

void ReadAhead::pump() {
  while (in_flight_ < depth_ && !jobs_.empty()) {
    AheadJob& job = jobs_.front();
    if (job.next == job.extents.size()) {
      jobs_.pop_front();
      continue;
    }
    uint32_t extent = job.extents[job.next++];
    ExtentUse use{job.pack.get(), extent, kNoFrame, 0, 0, job.pack->extent_mask(extent), 0, false, false};
    Frames::Ahead result = frames_.acquire_ahead(use, kWeight);
    if (result == Frames::Ahead::kFull) jobs_.pop_front();  // everything held is warmer than the rest of this job
    if (result == Frames::Ahead::kRead) in_flight_ += path_.read(use, nullptr);
  }
}

void ReadAhead::landed(const Io& io, int error) {
  --in_flight_;
  if (error == 0) headgate::add(counters_.warm_bytes, io.bytes);
}

void ReadAhead::forget(const PackFile* pack) {
  std::erase_if(jobs_, [pack](const AheadJob& job) { return job.pack.get() == pack; });
}

}  // namespace headgate
