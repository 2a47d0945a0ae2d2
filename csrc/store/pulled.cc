#include "store/pulled.h"

#include <algorithm>
#include <span>

namespace headgate {

// Half of what the owner may have is left to what is read from disk, so that pins which wait for the worker never keep
// it waiting.
bool Pulled::keep(uint64_t seq, uint32_t frame) noexcept {
  const uint32_t most =
      std::min(owner_.arena.load(std::memory_order_relaxed), owner_.limit.load(std::memory_order_relaxed)) / 2;
  if (owner_.pulled.fetch_add(1, std::memory_order_relaxed) < most) try {
      auto [ticket, made] = tickets_.try_emplace(seq);
      try {
        ticket->second.frames.push_back(frame);
        return true;
      } catch (...) {
        if (made) tickets_.erase(ticket);
      }
    } catch (...) {
    }
  owner_.pulled.fetch_sub(1, std::memory_order_relaxed);
  return false;
}

void Pulled::answered(uint64_t seq, uint64_t now_ns) {
  if (auto found = tickets_.find(seq); found != tickets_.end()) found->second.answered_ns = now_ns;
}

bool Pulled::late(uint64_t now_ns, uint64_t patience_ns) const {
  if (tickets_.empty()) return false;
  const uint64_t since = tickets_.begin()->second.answered_ns;
  return since != 0 && now_ns > since + patience_ns;
}

bool Pulled::release(uint64_t seq, size_t frames_max, Frames& frames) {
  bool any = false;
  while (!tickets_.empty() && tickets_.begin()->first <= seq && frames_max > 0) {
    std::vector<uint32_t>& kept = tickets_.begin()->second.frames;
    const size_t count = std::min(kept.size(), frames_max);
    frames.release(std::span<const uint32_t>(kept).last(count));
    owner_.pulled.fetch_sub(uint32_t(count), std::memory_order_relaxed);
    kept.resize(kept.size() - count);
    if (kept.empty()) tickets_.erase(tickets_.begin());
    frames_max -= count;
    any = true;
  }
  return any;
}

}  // namespace headgate
