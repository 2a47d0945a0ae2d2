#include "store/tier/lfu.h"

#include <bit>
#include <utility>

namespace headgate {

Lfu::Lfu(uint32_t frames)
    : Queues(frames),
      held_(frames),
      ghosts_(std::bit_ceil(std::max<uint64_t>(uint64_t{frames} * kGhostsPerFrame, kWays))),
      round_shift_(std::bit_width(uint64_t{frames} + frames / 2) - 1) {}

void Lfu::admit(uint32_t frame, uint64_t key, uint8_t weight, Domain& own, Domain* common) {
  ++admitted_;
  if (own.number == 0) own.number = ++owners_;
  frames_[frame] = {};
  Held& held = held_[frame] = {mixed(key), &own, round(own), 0, weight};
  for (Ghost& ghost : ghosts(held.key)) {
    if (ghost.owner != own.number || ghost.tag != tag(held.key)) continue;
    held.uses = faded(ghost.uses, held.since - ghost.since);
    ghost = {};
  }
  own.lists[kNew].push(links_[Domain::kOwn], frame);
  if (common) common->lists[kNew].push(links_[Domain::kCommon], frame);
}

void Lfu::remove(uint32_t frame) {
  Queues::remove(frame);
  Held& held = counted(frame);
  settle(held);
  if (held.uses > 0) {
    Ghost& place = least_of_most(ghosts(held.key), held.own->number);
    place = {tag(held.key), held.own->number, held.since, held.uses};
  }
  held = {};
}

// Where an owner's next ghost goes: to a free place, or to the least of whoever would have the most here, of equals the
// owner itself; so nobody loses places to an owner that has more.
Lfu::Ghost& Lfu::least_of_most(std::span<Ghost, kWays> line, uint32_t owner) {
  Ghost* least = nullptr;
  long most = 0;
  for (Ghost& ghost : line) {
    if (ghost.owner == 0) return ghost;
    const long all = std::count_if(line.begin(), line.end(), [&](const Ghost& g) { return g.owner == ghost.owner; });
    const long has = 2 * all + (ghost.owner == owner ? 3 : 0);  // in halves
    if (has < most || (has == most && (ghost.owner != least->owner || !fewer(ghost, *least)))) continue;
    least = &ghost;
    most = has;
  }
  return *least;
}

// As of the later one's round.
bool Lfu::fewer(const Ghost& a, const Ghost& b) {
  const bool later = int32_t(a.since - b.since) >= 0;
  return later ? a.uses < faded(b.uses, a.since - b.since) : faded(a.uses, b.since - a.since) < b.uses;
}

void Lfu::settle(Held& held) const {
  const uint32_t now = round(*held.own), rounds = now - held.since;
  if (rounds == 0) return;
  held.uses = faded(held.uses, rounds);
  held.weight -= uint8_t(std::min<uint32_t>(held.weight, rounds));
  held.since = now;
}

// With the uses that it had since it was looked at, of which `most` pass as time.
Lfu::Held& Lfu::counted(uint32_t frame, uint32_t most) {
  Held& held = held_[frame];
  if (const uint32_t uses = std::exchange(frames_[frame].uses, 0)) {
    held.own->uses += std::min(uses, most);
    settle(held);
    held.uses = uint16_t(std::min<uint32_t>(held.uses + uses * kUse, kUsesMax));
  }
  return held;
}

// One use more displaces nothing: extents that are wanted in turn, as often as each other, would displace each other.
uint32_t Lfu::rank(uint32_t frame) {
  Held held = counted(frame);
  const bool overdue = uint64_t{held.uses} * (round(*held.own) - held.since) > kOverdue;
  settle(held);
  return held.weight + (overdue ? 0 : (held.uses + kUse) / (2u * kUse));
}

std::optional<uint32_t> Lfu::victim(Domain& domain, const Evictable& evictable, uint64_t looks) {
  Links& links = links_[domain.side];
  std::optional<uint32_t> least;
  uint32_t lowest = 0, seen = 0, fresh[kSample], fresh_seen = 0;
  uint64_t look = 0, left[] = {domain.lists[kHeld].size(), domain.lists[kNew].size()};
  auto sample = [&](uint32_t from, uint32_t count, uint64_t most) {
    for (; left[from] > 0 && most > 0 && seen < count; --left[from], --most) {
      if (++look > (least ? looks : kLooksMax)) return;
      const uint32_t frame = domain.lists[from].turn(links);
      if (!evictable(frame)) continue;
      ++seen;
      if (from == kNew) fresh[fresh_seen++] = frame;
      if (const uint32_t its = rank(frame); !least || its < lowest) {
        least = frame;
        lowest = its;
      }
    }
  };
  sample(kNew, domain.lists[kNew].size() > domain.stay_new / kStay ? 2 : 1, kSample);
  if (fresh_seen > 0) {
    domain.stay_new -= domain.stay_new > 0;
  } else if (domain.stay_new < domain.size() / 4 * kStay) {
    domain.stay_new += kStay;
  }
  sample(kHeld, kSample, UINT64_MAX);
  sample(kNew, kSample, least ? kSample : UINT64_MAX);
  for (uint32_t i = 0; i < fresh_seen; ++i) {
    if (fresh[i] == least) continue;
    domain.lists[kNew].remove(links, fresh[i]);
    domain.lists[kHeld].push(links, fresh[i]);
  }
  return least;
}

std::optional<uint32_t> Lfu::coldest(Domain& domain, const Evictable& evictable, uint8_t weight) {
  auto unused = [&](uint32_t frame) { return cold_now(frame, weight); };
  for (uint32_t from : {kHeld, kNew})
    if (auto found = cold(domain.lists[from], domain.side, evictable, unused)) return found;
  return std::nullopt;
}

// For a read ahead a count loses half in each round without a use: what was used once is cold after two, what was used
// most after six. Such looks come many at once, so what a frame was used before one passes as a single use: else a look
// at all frames would make those cold that it began with.
bool Lfu::cold_now(uint32_t frame, uint8_t weight) {
  Held held = counted(frame, 1);
  const uint32_t rounds = round(*held.own) - held.since;
  settle(held);
  return held.weight < weight && held.uses >> std::min(rounds, 15u) < kUse / 4;
}

}  // namespace headgate
