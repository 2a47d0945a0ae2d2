#include "store/tier/replay.h"

#include <unordered_map>

#include "store/error.h"
#include "store/tier/policy.h"

namespace headgate {

std::vector<uint8_t> replay(const std::string& policy, uint32_t frames, std::span<const uint64_t> keys) {
  if (frames < 1) throw invalid_argument("frames = 0; a tier has at least one");
  auto chosen = make_policy(policy, frames);
  Domain own(Domain::kOwn);
  std::unordered_map<uint64_t, uint32_t> frame_of;
  std::vector<uint64_t> held(frames);
  std::vector<uint8_t> hits;
  hits.reserve(keys.size());
  for (uint64_t key : keys) {
    auto [found, fresh] = frame_of.try_emplace(key, uint32_t(frame_of.size()));
    if (fresh && frame_of.size() > frames) {
      const uint32_t victim = *chosen->victim(own, [](uint32_t) { return true; });
      chosen->remove(victim);
      frame_of.erase(held[victim]);
      found->second = victim;
    }
    if (fresh) {
      held[found->second] = key;
      chosen->admit(found->second, key, 0, own, nullptr);
    }
    chosen->use({&found->second, 1});
    hits.push_back(!fresh);
  }
  return hits;
}

}  // namespace headgate
