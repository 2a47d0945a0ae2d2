#include "store/tier/s3fifo.h"

#include <bit>

namespace headgate {

S3Fifo::S3Fifo(uint32_t frames) : Queues(frames), keys_(frames), ghosts_(std::bit_ceil(uint64_t{frames} + 1)) {}

void S3Fifo::admit(uint32_t frame, uint64_t key, uint8_t weight, Domain& own, Domain* common) {
  frames_[frame] = {0, weight};
  keys_[frame] = mixed(key);
  own.lists[queue_for(own, keys_[frame], weight)].push(links_[Domain::kOwn], frame);
  if (common) common->lists[queue_for(*common, keys_[frame], weight)].push(links_[Domain::kCommon], frame);
}

// One that left no more leavings ago than the main queue is long would be in it, had it not.
uint32_t S3Fifo::queue_for(const Domain& domain, uint64_t key, uint8_t weight) {
  const Ghost& seen = ghost(key);
  const bool remembered = seen.number > 0 && seen.tag == tag(key) && left_ - seen.number < domain.lists[kMain].size();
  return weight > 0 || remembered ? kMain : kSmall;
}

std::optional<uint32_t> S3Fifo::victim(Domain& domain, const Evictable& evictable, uint64_t looks) {
  FrameList& small = domain.lists[kSmall];
  FrameList& main = domain.lists[kMain];
  const uint64_t steps = uint64_t{domain.size()} * (kWeightMax + kUsesMax + 2);
  std::optional<uint32_t> passed;
  uint32_t busy[2] = {};  // frames in a row that are not evictable
  for (uint64_t step = 0; step < steps && step < (passed ? looks : kLooksMax); ++step) {
    const bool small_left = busy[kSmall] < small.size(), main_left = busy[kMain] < main.size();
    if (!small_left && !main_left) break;
    const bool full = uint64_t{small.size()} * kSmallPart >= domain.size();
    const uint32_t from = small_left && (full || !main_left) ? kSmall : kMain;
    const uint32_t frame = domain.lists[from].turn(links_[domain.side]);
    if (!evictable(frame)) {
      ++busy[from];
      continue;
    }
    busy[from] = 0;
    passed = frame;
    Frame& f = frames_[frame];
    if (from == kSmall) {
      if (f.uses <= 1 && f.weight == 0) break;
      enter_main(domain, frame);
    } else if (f.uses > 0) {
      --f.uses;
    } else if (!wear(frame)) {
      break;
    }
  }
  if (passed && links_[domain.side][*passed].list == &small) leave_for_good(*passed);
  return passed;
}

void S3Fifo::enter_main(Domain& domain, uint32_t frame) {
  Links& links = links_[domain.side];
  domain.lists[kSmall].remove(links, frame);
  domain.lists[kMain].push(links, frame);
  frames_[frame].uses = 0;
}

void S3Fifo::leave_for_good(uint32_t frame) {
  if (++left_ == 0) left_ = 1;
  ghost(keys_[frame]) = {tag(keys_[frame]), left_};
}

std::optional<uint32_t> S3Fifo::coldest(Domain& domain, const Evictable& evictable, uint8_t weight) {
  return cold(domain.lists[kMain], domain.side, evictable, weight);
}

}  // namespace headgate
