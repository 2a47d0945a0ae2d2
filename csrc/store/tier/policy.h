// Which frame to give up: an order that a tier keeps of its frames, chosen by name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/tier/frame_list.h"

namespace headgate {

// Frames that one choice is made among: those of an owner, or those of all owners who have no arena. A policy keeps
// them in one list or in two. Stays where it is.
struct Domain {
  enum Side : uint8_t { kOwn, kCommon };  // a frame is in one of each at most

  explicit Domain(Side side) : side(side) {}
  uint32_t size() const { return lists[0].size() + lists[1].size(); }

  const Side side;
  FrameList lists[2];
  // For the policy: how many frames stay new, in parts of one; and of an owner's its number among those that have taken
  // a frame, from 1, and uses of its frames.
  uint32_t stay_new = 0;
  uint32_t number = 0;
  uint64_t uses = 0;
};

// Decisions only: no memory of the tier, no I/O, no clock of its own. Not thread-safe. A frame is admitted, used,
// weighed and removed by whoever holds the tier; a frame that somebody waited for is used as soon as it is admitted.
class Policy {
 public:
  using Evictable = std::function<bool(uint32_t)>;
  static constexpr uint8_t kWeightMax = 7;
  static constexpr uint64_t kLooksMax = 1024;

  virtual ~Policy() = default;

  // `key` names the extent that the frame now holds; `weight`: how much longer it stays unused, in turns of the order.
  // `common`: null for a frame of an arena.
  virtual void admit(uint32_t frame, uint64_t key, uint8_t weight, Domain& own, Domain* common) = 0;
  virtual void use(std::span<const uint32_t> frames) = 0;
  virtual void weigh(uint32_t frame, uint8_t weight) = 0;
  virtual void remove(uint32_t frame) = 0;

  // For a read that a run waits for: some frame that is evictable. After `looks`, which a large tier reaches when
  // everything was just used, the frame last passed over has to go. None, after kLooksMax, when so many in a row cannot
  // go now: the next call looks at those behind them.
  virtual std::optional<uint32_t> victim(Domain& domain, const Evictable& evictable, uint64_t looks = kLooksMax) = 0;
  // For what nobody waits for: only a frame that is colder than everything with a use or a weight of at least `weight`,
  // and nothing wears down.
  virtual std::optional<uint32_t> coldest(Domain& domain, const Evictable& evictable, uint8_t weight = 1) = 0;
};

// The default first.
const std::vector<std::string>& policy_names();
// For a tier of so many frames. INVALID_ARGUMENT for a name that is none.
std::unique_ptr<Policy> make_policy(const std::string& name, uint32_t frames);

}  // namespace headgate
