#include "store/tier/frames.h"

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
constexpr size_t kLookAhead = 8;      // extents whose state is fetched before it is looked at
constexpr uint32_t kUsesAtOnce = 64;  // that the policy hears of together

// While an owner shrinks, or a pack is dropped, the mutex is held for some 20 us at a time.
constexpr uint32_t kShrinkAtOnce = 256;
constexpr size_t kDropLooks = 8192;  // extents, most of them without a frame
constexpr uint64_t kShrinkLooks = 16;

constexpr uint32_t kVictimsAtOnce = 8;  // that may be held before they go

// Where a policy finds no victim, there is none.
bool seen_at_once(const Domain& domain) { return domain.size() <= Policy::kLooksMax; }

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

Frames::Frames(uint64_t dram_bytes, uint64_t arena_bytes, uint32_t extent_blocks, const std::string& policy,
               Counters& counters)
    : extent_blocks_(extent_blocks),
      count_(frames_in(dram_bytes, extent_blocks)),
      arena_frames_(arena_frames_in(arena_bytes, extent_blocks)),
      arenas_end_(arena_frames_ < arena_unit(extent_blocks) ? count_ : count_ - count_ % arena_unit(extent_blocks)),
      counters_(counters),
      meta_(count_),
      policy_(make_policy(policy, count_)) {
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
  account.limit.store(frames);
  releases_.fetch_add(1, std::memory_order_release);
}

bool Frames::shrink(FrameAccount& account) {
  std::lock_guard lock(mutex_);
  auto evictable = [this](uint32_t frame) { return at_rest(frame); };
  for (uint32_t gone = 0; gone < kShrinkAtOnce; ++gone) {
    bool above = account.used > account.limit.load(std::memory_order_relaxed);
    bool some_go = above && account.pinned.load(std::memory_order_relaxed) < account.used;
    const auto victim = some_go ? policy_->victim(account.frames, evictable, kShrinkLooks) : std::nullopt;
    if (!victim) {
      if (some_go && !seen_at_once(account.frames)) return false;
      releases_.fetch_add(1, std::memory_order_release);
      return true;
    }
    give_up(*victim);
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

std::map<uint32_t, uint64_t> Frames::moved_by_owner() const {
  std::lock_guard lock(mutex_);
  std::map<uint32_t, uint64_t> moved;
  for (const auto& [number, account] : accounts_)
    if (const uint64_t bytes = account.moved_bytes.load(std::memory_order_relaxed); bytes > 0) moved[number] = bytes;
  return moved;
}

// The hold comes first: from then on the frame keeps what it has. If that is still the extent, it had been so.
bool Frames::hold(ExtentUse& use) {
  const auto frame_of = as_atomic(use.pack->frame_of_extent[use.extent]);
  use.frame = frame_of.load(std::memory_order_acquire);
  if (use.frame == kNoFrame) return false;
  const auto held = as_atomic(meta_[use.frame].held);
  const bool live = held.fetch_add(1) & kLive;
  if (live && frame_of.load(std::memory_order_acquire) == use.frame) return true;
  held.fetch_sub(1);
  std::lock_guard lock(mutex_);  // what else the frame has may have stayed because of this hold
  const PackFile* pack = meta_[use.frame].pack;
  if (pack && at_rest(use.frame) && has_to_go(*pack, use.frame)) give_up(use.frame);
  return false;
}

void Frames::let_go(std::span<const ExtentUse> uses) {
  bool some_go = false;
  for (const ExtentUse& use : uses) {
    as_atomic(meta_[use.frame].held).fetch_sub(1);  // before the looks: one of both sides sees the other
    some_go |= use.pack->closed.load() || use.pack->account.used.load() > use.pack->account.limit.load();
  }
  if (some_go || reserved_.load() > 0) {
    std::lock_guard lock(mutex_);
    for (const ExtentUse& use : uses)
      if (use.pack->frame_of_extent[use.extent] == use.frame && at_rest(use.frame) && has_to_go(*use.pack, use.frame))
        give_up(use.frame);
  }
  releases_.fetch_add(1, std::memory_order_release);
}

void Frames::keep(std::span<const ExtentUse> uses) {
  std::lock_guard lock(mutex_);
  for (const ExtentUse& use : uses)
    if (use.kept) pin(use.frame, 1);
}

void Frames::tell(std::vector<uint32_t>& used) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock && used.size() < kUsesKept) return;
  if (!lock) lock.lock();
  std::erase_if(used, [this](uint32_t frame) { return meta_[frame].pack == nullptr; });
  policy_->use(used);
  used.clear();
}

size_t Frames::acquire(std::span<ExtentUse> uses, size_t cold_max) {
  std::lock_guard lock(mutex_);
  size_t pinned = 0;
  uint64_t hits = 0;
  uint32_t used[kUsesAtOnce];
  uint32_t used_count = 0;
  for (ExtentUse& use : uses) {
    if (pinned + kLookAhead < uses.size()) prefetch(uses[pinned + kLookAhead]);
    use.frame = use.pack->frame_of_extent[use.extent];
    bool room = pinned - hits < cold_max;
    if (use.frame == kNoFrame) {
      if (room) use.frame = take_frame(use.pack->account, {true, 0});
      if (use.frame == kNoFrame) break;
      admit(use.frame, use, 0);
    }
    look(use);
    if (!use.ready && !room) break;
    pin(use.frame, 1);
    used[used_count++] = use.frame;
    if (used_count == kUsesAtOnce) policy_->use({used, std::exchange(used_count, 0)});
    hits += use.ready;
    ++pinned;
  }
  policy_->use({used, used_count});
  add(counters_.extent_hits, hits);
  add(counters_.extent_misses, pinned - hits);
  return pinned;
}

void Frames::prefetch(const ExtentUse& use) const {
  uint32_t frame = use.pack->frame_of_extent[use.extent];
  if (frame != kNoFrame) __builtin_prefetch(&meta_[frame], 1);
}

Frames::Ahead Frames::acquire_cold(ExtentUse& use, uint8_t weight, uint8_t above) {
  std::lock_guard lock(mutex_);
  use.frame = use.pack->frame_of_extent[use.extent];
  if (use.frame == kNoFrame) {
    use.frame = take_frame(use.pack->account, {false, above});
    if (use.frame == kNoFrame) return Ahead::kFull;
    admit(use.frame, use, weight);
  }
  policy_->weigh(use.frame, weight);
  use.to_read = 0;
  claim(use, use.wanted);
  if (use.to_read == 0) return Ahead::kResident;
  pin(use.frame, pieces(use.to_read));
  return Ahead::kRead;
}

Frames::Missing Frames::refresh(std::span<ExtentUse> uses) {
  std::lock_guard lock(mutex_);
  Missing missing = Missing::kNothing;
  for (ExtentUse& use : uses) {
    if (use.ready) continue;
    look(use);
    if (use.ready) continue;
    const Meta& m = meta_[use.frame];
    missing = std::max(missing, use.wanted & ~(m.valid | m.loading) ? Missing::kUnclaimed : Missing::kBeingRead);
  }
  return missing;
}

void Frames::look(ExtentUse& use) const { use.ready = (use.wanted & ~meta_[use.frame].valid) == 0; }

void Frames::claim(std::span<ExtentUse> uses, uint32_t through) {
  std::lock_guard lock(mutex_);
  ExtentUse* before = nullptr;  // the last that has anything to read
  uint64_t next = 0;            // the block of its file behind that
  for (ExtentUse& use : uses) {
    use.to_read = 0;
    look(use);
    claim(use, use.wanted);
    const uint64_t begin = uint64_t{use.extent} * extent_blocks_;
    for (uint32_t left = use.to_read; left != 0; left &= left - 1) {
      const uint64_t block = begin + uint32_t(std::countr_zero(left));
      if (before && before->pack == use.pack && block > next && block - next <= through) {
        claim(*before, blocks_within(*before, next, block));
        claim(use, blocks_within(use, next, block));
      }
      before = &use;
      next = block + 1;
    }
  }
}

// Those of them that are neither valid nor being read.
void Frames::claim(ExtentUse& use, uint32_t blocks) {
  Meta& m = meta_[use.frame];
  const uint16_t claimed = uint16_t(blocks & ~(m.valid | m.loading));
  use.to_read |= claimed;
  m.loading |= claimed;
}

// Blocks [first, end) of the file, as far as they lie in the extent.
uint32_t Frames::blocks_within(const ExtentUse& use, uint64_t first, uint64_t end) const {
  const uint64_t begin = uint64_t{use.extent} * extent_blocks_;
  const uint64_t from = std::clamp(first, begin, begin + extent_blocks_) - begin;
  const uint64_t to = std::clamp(end, begin, begin + extent_blocks_) - begin;
  return (1u << to) - (1u << from);
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
    const auto valid = as_atomic(meta_[l.frame].valid);
    valid.store(uint16_t(valid.load(std::memory_order_relaxed) | l.good), std::memory_order_release);
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
    if (meta_[frame].pins == 0 && give_up(frame)) {
      ++gone;
    } else {
      reading |= meta_[frame].loading != 0;
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

uint32_t Frames::take_frame(FrameAccount& owner, Purpose purpose) {
  const uint32_t limit = owner.limit.load(std::memory_order_relaxed);
  if (owner.used > limit) return kNoFrame;
  if (uint32_t frame = owner.used < limit ? free_frame(owner) : kNoFrame; frame != kNoFrame) return frame;
  for (uint32_t tries = 0; tries < kVictimsAtOnce; ++tries) {
    const auto victim = cold_frame(owner, purpose);
    if (!victim) break;
    if (!evict(*victim)) continue;
    add(counters_.evictions);
    return *victim;
  }
  return kNoFrame;
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
std::optional<uint32_t> Frames::cold_frame(FrameAccount& owner, Purpose purpose) {
  const bool own = owner.part || owner.used == owner.limit.load(std::memory_order_relaxed);
  // A sweep could only find that out again, and starved runs ask often.
  if (own ? owner.pinned.load(std::memory_order_relaxed) == owner.used : this->unpinned(owner) == 0)
    return std::nullopt;
  auto evictable = [&](uint32_t frame) { return at_rest(frame) && open_to(owner, frame); };
  Domain& domain = own ? owner.frames : everybody_;
  if (!purpose.waits) {
    const auto cold = policy_->coldest(domain, evictable);
    return cold || purpose.above <= 1 ? cold : policy_->coldest(owner.frames, evictable, purpose.above);
  }
  const auto victim = policy_->victim(domain, evictable);
  // Whoever waits for frames asks again, for those behind the ones that were looked at.
  if (!victim && !seen_at_once(domain)) releases_.fetch_add(1, std::memory_order_release);
  return victim;
}

bool Frames::at_rest(uint32_t frame) const {
  const Meta& m = meta_[frame];
  return m.pins == 0 && as_atomic(m.held).load(std::memory_order_relaxed) == kLive;
}

// Once nobody has it pinned or held.
bool Frames::has_to_go(const PackFile& pack, uint32_t frame) const {
  const FrameAccount& owner = pack.account;
  return pack.closed || owner.used > owner.limit.load(std::memory_order_relaxed) || !open_to(owner, frame);
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
  if (has_to_go(*m.pack, frame)) give_up(frame);
}

void Frames::count_pinned(const FrameAccount& owner, int frames) {
  pinned_.fetch_add(uint32_t(frames), std::memory_order_relaxed);
  if (!owner.part) common_pinned_.fetch_add(uint32_t(frames), std::memory_order_relaxed);
}

void Frames::admit(uint32_t frame, const ExtentUse& use, uint8_t weight) {
  Meta& m = meta_[frame];
  m.pack = use.pack, m.extent = use.extent;
  as_atomic(use.pack->frame_of_extent[use.extent]).store(frame, std::memory_order_release);
  as_atomic(m.held).fetch_or(kLive);
  ++use.pack->frames;
  FrameAccount& owner = use.pack->account;
  ++owner.used;
  policy_->admit(frame, use.pack->key(use.extent), weight, owner.frames, owner.part ? nullptr : &everybody_);
}

bool Frames::evict(uint32_t frame) {
  Meta& m = meta_[frame];
  uint32_t unheld = kLive;
  if (!as_atomic(m.held).compare_exchange_strong(unheld, 0)) return false;
  blocks_evicted_ += std::popcount(m.valid);
  as_atomic(m.pack->frame_of_extent[m.extent]).store(kNoFrame, std::memory_order_release);
  --m.pack->frames;
  --m.pack->account.used;
  m.pack = nullptr, m.extent = 0, m.loading = 0;
  as_atomic(m.valid).store(0, std::memory_order_relaxed);
  policy_->remove(frame);
  return true;
}

bool Frames::give_up(uint32_t frame) {
  if (!evict(frame)) return false;
  part_of(frame).free.push_back(frame);
  return true;
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
    if (m.pins == 0 && give_up(next)) {
      ++gone;
    } else {
      ++pinned;
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

}  // namespace headgate
