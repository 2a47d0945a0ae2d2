#include "store/tier/access_trace.h"

#include <algorithm>
#include <new>

#include "store/error.h"

namespace headgate {
namespace {

std::vector<Access> room_for(size_t accesses) {
  std::vector<Access> room;
  try {
    room.reserve(accesses);
  } catch (const std::bad_alloc&) {
    throw resource_exhausted("no memory for a trace");
  }
  return room;
}

}  // namespace

void AccessTrace::start(uint64_t end_ns) {
  std::vector<Access> room = room_for(kAccessesMax);
  std::lock_guard lock(mutex_);
  if (listening_) throw failed_precondition("somebody traces already; one can at a time");
  listening_ = true;
  end_ns_ = end_ns;
  dropped_ = 0;
  accesses_ = std::move(room);
  on_.store(true, std::memory_order_relaxed);
}

std::pair<std::vector<Access>, uint64_t> AccessTrace::drain() {
  std::vector<Access> found = room_for(kAccessesMax);
  std::lock_guard lock(mutex_);
  if (!listening_) throw failed_precondition("nobody traces");
  accesses_.swap(found);
  return {std::move(found), dropped_};
}

void AccessTrace::stop() {
  std::vector<Access> gone;
  std::lock_guard lock(mutex_);
  listening_ = false;
  on_.store(false, std::memory_order_relaxed);
  accesses_.swap(gone);
}

void AccessTrace::record(std::span<const Access> accesses) {
  std::lock_guard lock(mutex_);
  if (!listening_ || accesses.empty()) return;
  if (accesses.front().time_ns >= end_ns_) return on_.store(false, std::memory_order_relaxed);
  const size_t taken = std::min(accesses.size(), kAccessesMax - accesses_.size());
  accesses_.insert(accesses_.end(), accesses.begin(), accesses.begin() + ptrdiff_t(taken));
  dropped_ += accesses.size() - taken;
}

}  // namespace headgate
