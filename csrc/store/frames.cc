#include "store/frames.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <unordered_map>

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

uint32_t frames_in(uint64_t dram_bytes, uint32_t extent_blocks) {
  if (extent_blocks < 1 || extent_blocks > kExtentBlocksMax) throw invalid_argument("extent_blocks must be 1..16");
  uint64_t frames = dram_bytes / (uint64_t{extent_blocks} * kBlockBytes);
  if (frames < 1 || frames >= kNoFrame)
    throw invalid_argument("dram_bytes = " + std::to_string(dram_bytes) + " must hold 1..2^32-2 extents of " +
                           std::to_string(extent_blocks * kBlockBytes) + " bytes");
  return uint32_t(frames);
}

// Runs of adjacent blocks: what has to be read in one request each.
uint32_t pieces(uint32_t blocks) { return uint32_t(std::popcount(blocks & ~(blocks << 1))); }

}  // namespace

Frames::Frames(uint64_t dram_bytes, uint32_t extent_blocks, Counters& counters)
    : extent_blocks_(extent_blocks),
      count_(frames_in(dram_bytes, extent_blocks)),
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
  free_.reserve(count_);
  for (uint32_t frame = count_; frame-- > 0;) free_.push_back(frame);
}

Frames::~Frames() { munmap(mapped_, mapped_bytes_); }

uint32_t Frames::used() const {
  std::lock_guard lock(mutex_);
  return count_ - uint32_t(free_.size());
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
  for (const ExtentUse& use : uses) unpin(use.frame, 1);
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

bool Frames::drop(PackFile& pack, size_t& next) {
  std::lock_guard lock(mutex_);
  const size_t end = std::min(pack.frame_of_extent.size(), next + kDropLooks);
  for (uint32_t gone = 0; pack.frames > 0 && next < end && gone < kShrinkAtOnce; ++next) {
    const uint32_t frame = pack.frame_of_extent[next];
    if (frame == kNoFrame || meta_[frame].pins > 0) continue;
    give_up(frame);
    ++gone;
  }
  return pack.frames == 0;
}

Frames::Census Frames::census() const {
  std::lock_guard lock(mutex_);
  Census found{blocks_landed_, blocks_evicted_, 0, 0, count_ - free_.size(), 0, 0};
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
  if (owner.used < limit && !free_.empty()) {
    uint32_t frame = free_.back();
    free_.pop_back();
    return frame;
  }
  auto victim = cold_frame(owner, ahead);
  if (!victim) return kNoFrame;
  evict(*victim);
  add(counters_.evictions);
  return *victim;
}

// Whose place the owner may take: of its own frames at its limit, of all below.
std::optional<uint32_t> Frames::cold_frame(FrameAccount& owner, bool ahead) {
  const bool own = owner.used == owner.limit.load(std::memory_order_relaxed);
  // A sweep could only find that out again, and starved runs ask often.
  if (own ? owner.pinned.load(std::memory_order_relaxed) == owner.used : pinned() == count_) return std::nullopt;
  auto unpinned = [this](uint32_t frame) { return meta_[frame].pins == 0; };
  if (!own) return ahead ? policy_.coldest(unpinned) : policy_.victim(unpinned);
  auto next = [&] { return advance(owner); };
  return ahead ? policy_.coldest(owner.used, next, unpinned) : policy_.victim(owner.used, next, unpinned);
}

uint32_t Frames::advance(FrameAccount& owner) {
  uint32_t frame = owner.hand;
  owner.hand = meta_[frame].after;
  return frame;
}

void Frames::pin(uint32_t frame, uint32_t count) {
  Meta& m = meta_[frame];
  if (count > 0 && m.pins == 0) {
    pinned_.fetch_add(1, std::memory_order_relaxed);
    m.pack->account.pinned.fetch_add(1, std::memory_order_relaxed);
  }
  m.pins += count;
}

void Frames::unpin(uint32_t frame, uint32_t count) {
  Meta& m = meta_[frame];
  m.pins -= count;
  if (count == 0 || m.pins > 0) return;
  FrameAccount& owner = m.pack->account;
  pinned_.fetch_sub(1, std::memory_order_relaxed);
  owner.pinned.fetch_sub(1, std::memory_order_relaxed);
  if (owner.used > owner.limit.load(std::memory_order_relaxed)) give_up(frame);
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
  free_.push_back(frame);
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
