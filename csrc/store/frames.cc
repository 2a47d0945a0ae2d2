#include "store/frames.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <unordered_map>
#include <utility>

#include "store/error.h"

namespace headgate {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr int kBlocksReadSingly = 3;  // with more blocks wanted, the whole extent costs the disk no more

constexpr size_t kLookAhead = 8;  // extents whose state is fetched before it is looked at

// While an owner shrinks, or a pack is dropped, the mutex is held for some 20 us at a time.
constexpr uint32_t kShrinkAtOnce = 256;
constexpr size_t kDropLooks = 8192;  // extents, most of them without a frame
constexpr uint64_t kShrinkLooks = 16;

constexpr uint32_t kCommonFramesMin = 8;  // that no arena takes, so that several runs at once find some
constexpr uint32_t kArenaFramesMin = 8;
constexpr uint32_t kArenasMax = 64;
constexpr uint64_t kArenaBytesMax = 127ull << 30;  // an answer has 31 bits for a line of it

uint32_t frames_in(uint64_t dram_bytes, uint32_t extent_blocks) {
  if (extent_blocks < 1 || extent_blocks > kExtentBlocksMax) throw invalid_argument("extent_blocks must be 1..16");
  uint64_t frames = dram_bytes / (uint64_t{extent_blocks} * kBlockBytes);
  if (frames < 1 || frames >= kNoFrame)
    throw invalid_argument("dram_bytes = " + std::to_string(dram_bytes) + " must hold 1..2^32-2 extents of " +
                           std::to_string(extent_blocks * kBlockBytes) + " bytes");
  return uint32_t(frames);
}

// Of an arena: whole huge pages where frames fill them.
uint32_t arena_unit(uint32_t extent_blocks) {
  const uint64_t frame_bytes = uint64_t{extent_blocks} * kBlockBytes;
  return kHugePage % frame_bytes == 0 ? uint32_t(kHugePage / frame_bytes) : 1;
}

uint32_t arena_frames_in(uint64_t arena_bytes, uint32_t extent_blocks) {
  const uint64_t frames = std::min(arena_bytes, kArenaBytesMax) / (uint64_t{extent_blocks} * kBlockBytes);
  const uint32_t unit = arena_unit(extent_blocks);
  return frames >= unit ? uint32_t(frames / unit * unit) : uint32_t(frames);
}

// Runs of adjacent blocks: what has to be read in one request each.
uint32_t pieces(uint32_t blocks) { return uint32_t(std::popcount(blocks & ~(blocks << 1))); }

}  // namespace

Frames::Frames(uint64_t dram_bytes, uint64_t arena_bytes, uint32_t extent_blocks, Counters& counters)
    : extent_blocks_(extent_blocks),
      count_(frames_in(dram_bytes, extent_blocks)),
      arena_frames_(arena_frames_in(arena_bytes, extent_blocks)),
      arenas_end_(arena_frames_ < arena_unit(extent_blocks) ? count_ : count_ - count_ % arena_unit(extent_blocks)),
      counters_(counters),
      meta_(count_),
      policy_(count_) {
  uint64_t bytes = uint64_t{count_} * frame_bytes();
  mapped_bytes_ = bytes + kHugePage;
  void* at = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw system_error("dram_bytes: mmap", errno);
  mapped_ = static_cast<uint8_t*>(at);
  memory_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + kHugePage - 1) / kHugePage * kHugePage);
  // Only whole huge pages are advised, so that the last one cannot reach past dram_bytes. Without them it is slower.
  if (bytes >= kHugePage) madvise(memory_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  const uint32_t spare = arenas_end_ - std::min(arenas_end_, kCommonFramesMin);
  parts_.resize(1 + (arena_frames_ < kArenaFramesMin ? 0 : std::min(spare / arena_frames_, kArenasMax)));
  for (size_t i = 1; i < parts_.size(); ++i) parts_[i].free.reserve(arena_frames_);
  parts_[0].free.reserve(count_ - uint32_t(parts_.size() - 1) * arena_frames_);
  for (uint32_t frame = count_; frame-- > 0;) part_of(frame).free.push_back(frame);
  common_ = count_;
}

Frames::~Frames() { munmap(mapped_, mapped_bytes_); }

uint32_t Frames::used() const {
  std::lock_guard lock(mutex_);
  return count_ - free_frames();
}

uint32_t Frames::free_frames() const {
  uint32_t count = 0;
  for (const FramePart& part : parts_) count += uint32_t(part.free.size());
  return count;
}

uint32_t Frames::tier(const FrameAccount& owner) const {
  const uint32_t arena = owner.arena.load(std::memory_order_relaxed);
  return arena > 0 ? arena : common_.load(std::memory_order_relaxed);
}

uint32_t Frames::unpinned(const FrameAccount& owner) const {
  const bool alone = owner.arena.load(std::memory_order_relaxed) > 0;
  const uint32_t pinned = (alone ? owner.pinned : common_pinned_).load(std::memory_order_relaxed);
  const uint32_t all = tier(owner);
  return all - std::min(all, pinned);
}

FrameAccount& Frames::account(uint32_t owner) {
  std::lock_guard lock(mutex_);
  return accounts_.try_emplace(owner, owner).first->second;
}

void Frames::set_limit(FrameAccount& account, uint32_t frames) {
  std::lock_guard lock(mutex_);
  account.limit.store(frames, std::memory_order_relaxed);
  releases_.fetch_add(1, std::memory_order_release);
}

bool Frames::shrink(FrameAccount& account) {
  std::lock_guard lock(mutex_);
  auto unpinned = [this](uint32_t frame) { return meta_[frame].pins == 0; };
  for (uint32_t gone = 0; gone < kShrinkAtOnce; ++gone) {
    bool above = account.used > account.limit.load(std::memory_order_relaxed);
    if (!above || account.pinned.load(std::memory_order_relaxed) == account.used) {
      releases_.fetch_add(1, std::memory_order_release);
      return true;
    }
    give_up(*policy_.victim(account.used, [&] { return advance(account); }, unpinned, kShrinkLooks));
  }
  return false;
}

std::map<uint32_t, uint32_t> Frames::used_by_owner() const {
  std::lock_guard lock(mutex_);
  std::map<uint32_t, uint32_t> used;
  for (const auto& [number, account] : accounts_)
    if (account.used > 0) used[number] = account.used;
  return used;
}

size_t Frames::acquire(std::span<ExtentUse> uses, size_t cold_max) {
  std::lock_guard lock(mutex_);
  size_t pinned = 0;
  uint64_t hits = 0;
  for (ExtentUse& use : uses) {
    if (pinned + kLookAhead < uses.size()) prefetch(uses[pinned + kLookAhead]);
    use.frame = use.pack->frame_of_extent[use.extent];
    bool room = pinned - hits < cold_max;
    if (use.frame == kNoFrame) {
      if (room) use.frame = take_frame(use.pack->account, false);
      if (use.frame == kNoFrame) break;
      admit(use.frame, use, 0);
    }
    look(use);
    if (!use.ready && !room) break;
    pin(use.frame, 1);
    policy_.use(use.frame);
    hits += use.ready;
    ++pinned;
  }
  add(counters_.extent_hits, hits);
  add(counters_.extent_misses, pinned - hits);
  return pinned;
}

void Frames::prefetch(const ExtentUse& use) const {
  uint32_t frame = use.pack->frame_of_extent[use.extent];
  if (frame != kNoFrame) __builtin_prefetch(&meta_[frame], 1);
}

Frames::Ahead Frames::acquire_ahead(ExtentUse& use, uint8_t weight) {
  std::lock_guard lock(mutex_);
  use.frame = use.pack->frame_of_extent[use.extent];
  if (use.frame == kNoFrame) {
    use.frame = take_frame(use.pack->account, true);
    if (use.frame == kNoFrame) return Ahead::kFull;
    admit(use.frame, use, weight);
  }
  policy_.weigh(use.frame, weight);
  claim(use);
  if (use.to_read == 0) return Ahead::kResident;
  pin(use.frame, pieces(use.to_read));
  return Ahead::kRead;
}

void Frames::refresh(std::span<ExtentUse> uses) {
  std::lock_guard lock(mutex_);
  for (ExtentUse& use : uses)
    if (!use.ready) look(use);
}

void Frames::look(ExtentUse& use) const { use.ready = (use.wanted & ~meta_[use.frame].valid) == 0; }

void Frames::claim(std::span<ExtentUse> uses) {
  std::lock_guard lock(mutex_);
  for (ExtentUse& use : uses) claim(use);
}

void Frames::claim(ExtentUse& use) {
  Meta& m = meta_[use.frame];
  look(use);
  use.to_read = use.wanted & ~(m.valid | m.loading);
  if (std::popcount(use.to_read) > kBlocksReadSingly)
    use.to_read = use.pack->extent_mask(use.extent) & ~(m.valid | m.loading);
  m.loading |= use.to_read;
}

void Frames::release(std::span<const ExtentUse> uses) {
  std::lock_guard lock(mutex_);
  for (const ExtentUse& use : uses)
    if (!use.kept) unpin(use.frame, 1);
  releases_.fetch_add(1, std::memory_order_release);
}

void Frames::release(std::span<const uint32_t> kept) {
  std::lock_guard lock(mutex_);
  for (uint32_t frame : kept) unpin(frame, 1);
  releases_.fetch_add(1, std::memory_order_release);
}

void Frames::landed(std::span<const Landing> landings) {
  std::lock_guard lock(mutex_);
  for (const Landing& l : landings) {
    meta_[l.frame].loading &= uint16_t(~(l.good | l.bad));
    blocks_landed_ += std::popcount(uint16_t(l.good & ~meta_[l.frame].valid));
    meta_[l.frame].valid |= l.good;
    unpin(l.frame, l.ahead);
  }
  releases_.fetch_add(1, std::memory_order_release);  // a read ahead holds its frame no longer
  landings_.fetch_add(1, std::memory_order_release);
}

Frames::Left Frames::drop(PackFile& pack, size_t& next) {
  std::lock_guard lock(mutex_);
  bool reading = false;
  pack.closed = true;
  const size_t end = std::min(pack.frame_of_extent.size(), next + kDropLooks);
  for (uint32_t gone = 0; pack.frames > 0 && next < end && gone < kShrinkAtOnce; ++next) {
    const uint32_t frame = pack.frame_of_extent[next];
    if (frame == kNoFrame) continue;
    if (meta_[frame].pins > 0) {
      reading |= meta_[frame].loading != 0;
    } else {
      give_up(frame);
      ++gone;
    }
  }
  return {pack.frames > 0, reading};
}

bool Frames::has_any(const PackFile& pack) const {
  std::lock_guard lock(mutex_);
  return pack.frames > 0;
}

Frames::Census Frames::census() const {
  std::lock_guard lock(mutex_);
  Census found{blocks_landed_, blocks_evicted_, 0, 0, count_ - free_frames(), 0, 0};
  std::unordered_map<const FrameAccount*, uint32_t> held;
  const FrameAccount* owner = nullptr;
  uint32_t* held_by_owner = nullptr;  // of neighbouring frames mostly the same
  for (const Meta& m : meta_) {
    found.blocks_valid += std::popcount(m.valid);
    if (m.pack == nullptr) continue;
    ++found.frames_held;
    if (owner != &m.pack->account) held_by_owner = &held[owner = &m.pack->account];
    ++*held_by_owner;
  }
  for (const auto& [number, account] : accounts_) {
    found.frames_of_owners += account.used;
    found.owners_miscounted += account.used != held[&account];
  }
  return found;
}

uint32_t Frames::take_frame(FrameAccount& owner, bool ahead) {
  const uint32_t limit = owner.limit.load(std::memory_order_relaxed);
  if (owner.used > limit) return kNoFrame;
  if (uint32_t frame = owner.used < limit ? free_frame(owner) : kNoFrame; frame != kNoFrame) return frame;
  auto victim = cold_frame(owner, ahead);
  if (!victim) return kNoFrame;
  evict(*victim);
  add(counters_.evictions);
  return *victim;
}

uint32_t Frames::free_frame(const FrameAccount& owner) {
  for (FramePart& part : parts_) {
    if (part.free.empty() || (owner.part ? owner.part != &part : part.owner != nullptr)) continue;
    uint32_t frame = part.free.back();
    part.free.pop_back();
    return frame;
  }
  return kNoFrame;
}

const FramePart& Frames::part_of(uint32_t frame) const {
  if (parts_.size() == 1 || frame >= arenas_end_) return parts_[0];
  const uint32_t arena = (arenas_end_ - 1 - frame) / arena_frames_;
  return parts_[arena < arenas() ? 1 + arena : 0];
}

FramePart& Frames::part_of(uint32_t frame) { return const_cast<FramePart&>(std::as_const(*this).part_of(frame)); }

bool Frames::open_to(const FrameAccount& owner, uint32_t frame) const {
  if (reserved_ == 0) return true;
  const FramePart& part = part_of(frame);
  return owner.part ? owner.part == &part : part.owner == nullptr;
}

// Whose place the owner may take: of its own frames at its limit or in its arena, of all below.
std::optional<uint32_t> Frames::cold_frame(FrameAccount& owner, bool ahead) {
  const bool own = owner.part || owner.used == owner.limit.load(std::memory_order_relaxed);
  // A sweep could only find that out again, and starved runs ask often.
  if (own ? owner.pinned.load(std::memory_order_relaxed) == owner.used : this->unpinned(owner) == 0)
    return std::nullopt;
  auto unpinned = [&](uint32_t frame) { return meta_[frame].pins == 0 && open_to(owner, frame); };
  auto next = [&] { return own ? advance(owner) : advance_common(); };
  const uint32_t frames = own ? owner.used : common_.load(std::memory_order_relaxed);
  return ahead ? policy_.coldest(frames, next, unpinned) : policy_.victim(frames, next, unpinned);
}

// Over arenas it jumps: they may be most of the tier.
uint32_t Frames::advance_common() {
  const uint32_t frame = common_hand_++;
  while (common_hand_ < count_ && reserved_ > 0 && part_of(common_hand_).owner)
    common_hand_ = arenas_end_ - (arenas_end_ - 1 - common_hand_) / arena_frames_ * arena_frames_;
  if (common_hand_ == count_) common_hand_ = 0;
  return frame;
}

uint32_t Frames::advance(FrameAccount& owner) {
  uint32_t frame = owner.hand;
  owner.hand = meta_[frame].after;
  return frame;
}

void Frames::pin(uint32_t frame, uint32_t count) {
  Meta& m = meta_[frame];
  if (count > 0 && m.pins == 0) {
    count_pinned(m.pack->account, 1);
    m.pack->account.pinned.fetch_add(1, std::memory_order_relaxed);
  }
  m.pins += count;
}

void Frames::unpin(uint32_t frame, uint32_t count) {
  Meta& m = meta_[frame];
  m.pins -= count;
  if (count == 0 || m.pins > 0) return;
  FrameAccount& owner = m.pack->account;
  count_pinned(owner, -1);
  owner.pinned.fetch_sub(1, std::memory_order_relaxed);
  if (m.pack->closed || owner.used > owner.limit.load(std::memory_order_relaxed) || !open_to(owner, frame))
    give_up(frame);
}

void Frames::count_pinned(const FrameAccount& owner, int frames) {
  pinned_.fetch_add(uint32_t(frames), std::memory_order_relaxed);
  if (!owner.part) common_pinned_.fetch_add(uint32_t(frames), std::memory_order_relaxed);
}

void Frames::admit(uint32_t frame, const ExtentUse& use, uint8_t weight) {
  meta_[frame] = {.pack = use.pack, .extent = use.extent};
  use.pack->frame_of_extent[use.extent] = frame;
  ++use.pack->frames;
  link(use.pack->account, frame);
  policy_.admit(frame, weight);
}

void Frames::evict(uint32_t frame) {
  Meta& m = meta_[frame];
  blocks_evicted_ += std::popcount(m.valid);
  m.pack->frame_of_extent[m.extent] = kNoFrame;
  --m.pack->frames;
  leave(m.pack->account, frame);
  m = {};
  policy_.remove(frame);
}

void Frames::give_up(uint32_t frame) {
  evict(frame);
  part_of(frame).free.push_back(frame);
}

// --- arenas ---

uint32_t Frames::reserve(const FrameAccount& owner) {
  std::lock_guard lock(mutex_);
  uint32_t arena = 0;
  while (arena < arenas() && parts_[1 + arena].owner) ++arena;
  if (arena == arenas()) return arena;
  parts_[1 + arena].owner = &owner;
  ++reserved_;
  common_.fetch_sub(arena_frames_, std::memory_order_relaxed);
  return arena;
}

uint32_t Frames::vacate(uint32_t& next, uint32_t end) {
  std::lock_guard lock(mutex_);
  end = uint32_t(std::min<uint64_t>(end, next + kDropLooks));
  uint32_t pinned = 0;
  for (uint32_t gone = 0; next < end && gone < kShrinkAtOnce; ++next) {
    const Meta& m = meta_[next];
    if (m.pack == nullptr || open_to(m.pack->account, next)) continue;
    if (m.pins > 0) {
      ++pinned;
    } else {
      give_up(next);
      ++gone;
    }
  }
  return pinned;
}

void Frames::move_in(FrameAccount& owner, uint32_t arena) {
  std::lock_guard lock(mutex_);
  common_pinned_.fetch_sub(owner.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  owner.part = &parts_[1 + arena];
  owner.arena.store(arena_frames_, std::memory_order_relaxed);
}

void Frames::move_out(FrameAccount& owner) {
  std::lock_guard lock(mutex_);
  common_pinned_.fetch_add(owner.pinned.load(std::memory_order_relaxed), std::memory_order_relaxed);
  owner.part = nullptr;
  owner.arena.store(0, std::memory_order_relaxed);
}

void Frames::unreserve(uint32_t arena) {
  std::lock_guard lock(mutex_);
  parts_[1 + arena].owner = nullptr;
  --reserved_;
  common_.fetch_add(arena_frames_, std::memory_order_relaxed);
  releases_.fetch_add(1, std::memory_order_release);
}

// Behind the hand, so that it comes there last.
void Frames::link(FrameAccount& owner, uint32_t frame) {
  if (owner.used++ == 0) owner.hand = meta_[frame].before = frame;
  Meta& m = meta_[frame];
  m.after = owner.hand;
  m.before = meta_[owner.hand].before;
  meta_[m.before].after = frame;
  meta_[m.after].before = frame;
}

void Frames::leave(FrameAccount& owner, uint32_t frame) {
  const Meta& m = meta_[frame];
  meta_[m.before].after = m.after;
  meta_[m.after].before = m.before;
  if (owner.hand == frame) owner.hand = m.after;
  --owner.used;
}

}  // namespace headgate
