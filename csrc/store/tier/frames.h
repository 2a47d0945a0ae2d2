// The DRAM tier: one region of huge pages cut into frames of one extent each.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ring/word.h"
#include "store/counters.h"
#include "store/mapping.h"
#include "store/pack_file.h"
#include "store/tier/access_trace.h"
#include "store/tier/policy.h"

namespace headgate {

// One extent as a run needs it. Its owner fills pack, extent, wanted, first and count; Frames the rest.
struct ExtentUse {
  PackFile* pack;
  uint32_t extent;
  uint32_t frame;
  uint32_t first;  // the records that lie in it, within the run's portion
  uint32_t count;
  uint16_t wanted;   // blocks
  uint16_t to_read;  // blocks that the caller must read now: claimed for it, nobody else does
  bool ready;        // every wanted block is valid
  bool kept;         // its pin is somebody else's now
};

// The end of one read into a frame.
struct Landing {
  uint32_t frame;
  uint16_t good;
  uint16_t bad;
  bool ahead;  // its pin ends with it
};

// Frames that lie together. One that is an arena is its owner's alone.
struct FramePart {
  std::vector<uint32_t> free;
  const FrameAccount* owner = nullptr;
};

// Thread-safe. The mutex is held for a batch of extents, never across I/O or copies. A pinned frame keeps its extent;
// blocks that are valid do not change, blocks that are loading belong to whoever reads them. Blocks are claimed as
// loading only when their read is submitted, so that nobody waits for a read that itself waits in a queue.
//
// A frame is held, without the mutex, for as long as some of its records are copied. Like a pin that keeps it, but
// nobody counts it: held frames are there again before anybody has waited for them.
//
// A frame belongs to the owner of its pack. An owner at its limit takes the place of its own frames only; above it,
// once the limit was lowered, it takes none, and a frame goes when its last pin does. An owner with an arena takes
// frames there and nowhere else, and nobody else does; what lies where it may not goes when its last pin does.
class Frames {
 public:
  // Never more than `dram_bytes` of memory. INVALID_ARGUMENT if not even one frame fits. arena_bytes: of an arena, as
  // many of which can be had as leave some frames for everybody else; 0: none. policy: one of policy_names().
  Frames(uint64_t dram_bytes, uint64_t arena_bytes, uint32_t extent_blocks, const std::string& policy,
         Counters& counters);
  ~Frames();
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  uint32_t count() const { return count_; }
  uint32_t used() const;
  uint32_t pinned() const { return pinned_.load(std::memory_order_relaxed); }
  // Frames that the owner's packs could have, and those of them that nobody has pinned.
  uint32_t tier(const FrameAccount& owner) const;
  uint32_t unpinned(const FrameAccount& owner) const;
  // Move on when frames may have become free and when reads have ended: what waits for either looks again then.
  uint64_t releases() const { return releases_.load(std::memory_order_acquire); }
  uint64_t landings() const { return landings_.load(std::memory_order_acquire); }
  uint32_t extent_blocks() const { return extent_blocks_; }
  uint32_t frame_bytes() const { return extent_blocks_ * kBlockBytes; }
  uint8_t* address(uint32_t frame) const { return memory_ + uint64_t{frame} * frame_bytes(); }

  // For whoever uses frames to tell, and for whoever listens.
  AccessTrace& accesses() { return accesses_; }

  // Lives as long as this does.
  FrameAccount& account(uint32_t owner);
  // From now on the account takes no frame beyond so many; shrink() gives up those that it has. kNoLimit: no bound.
  void set_limit(FrameAccount& account, uint32_t frames);
  // Gives up some frames above the limit; true when those that are left above it, if any, are pinned.
  bool shrink(FrameAccount& account);
  // Of every owner that has some.
  std::map<uint32_t, uint32_t> used_by_owner() const;
  std::map<uint32_t, uint64_t> moved_by_owner() const;  // bytes, since the start

  // Sets use.frame and holds it, until let_go; false if the extent has no frame. The caller's binding keeps the pack.
  bool hold(ExtentUse& use);
  // Blocks of a held frame that are valid.
  uint16_t valid(uint32_t frame) const { return as_atomic(meta_[frame].valid).load(std::memory_order_acquire); }
  void let_go(std::span<const ExtentUse> held);
  // Pins those held ones that are kept; before they are let go.
  void keep(std::span<const ExtentUse> held);
  // Tells the policy of uses that were held, soon: if others have the mutex just now, with the next ones.
  static constexpr size_t kUsesKept = 1024;
  void tell(std::vector<uint32_t>& used);
  // Pins the longest prefix of `uses` for which there are frames and in which at most `cold_max` are not ready;
  // returns its length.
  size_t acquire(std::span<ExtentUse> uses, size_t cold_max);
  // Claims what pinned uses still miss and nobody reads: to_read. Where at most `through` blocks of the file lie
  // between two of these, those of them that have their place in these frames are claimed too.
  void claim(std::span<ExtentUse> uses, uint32_t through);
  // The same for one extent read ahead, into a free or cold frame; it is pinned once for each piece to read.
  enum class Ahead { kRead, kResident, kFull };
  Ahead acquire_ahead(ExtentUse& use, uint8_t weight) { return acquire_cold(use, weight, 1); }
  // The same for blocks that the caller has in memory, side by side, of a file that nobody reads yet: it copies what is
  // to_read. Of its owner's frames also those give way that nobody has used and that weigh less.
  Ahead acquire_seed(ExtentUse& use, uint8_t weight) { return acquire_cold(use, weight, weight); }
  // Looks again at pinned uses: a read of this thread or another may have landed or failed. Returns what they miss.
  enum class Missing { kNothing, kBeingRead, kUnclaimed };
  Missing refresh(std::span<ExtentUse> uses);
  // Of those that are not kept.
  void release(std::span<const ExtentUse> uses);
  // The same for the pins of kept ones, by frame.
  void release(std::span<const uint32_t> kept);
  void landed(std::span<const Landing> landings);
  // Gives up unpinned frames of some of the pack's extents, from `next` on, which moves on; the others go with their
  // last pin. Whether any frame of the pack is left, and whether blocks are being read into one that was looked at.
  struct Left {
    bool any, reading;
  };
  Left drop(PackFile& pack, size_t& next);
  bool has_any(const PackFile& pack) const;

  // --- arenas, for Arenas alone, which makes one call of a kind at a time ---

  uint32_t arenas() const { return uint32_t(parts_.size() - 1); }
  uint32_t arena_frames() const { return arena_frames_; }
  uint32_t first_frame(uint32_t arena) const { return arenas_end_ - (arena + 1) * arena_frames_; }
  // Takes an arena that is nobody's away from all: no frame of it is taken from here on. None left: arenas().
  uint32_t reserve(const FrameAccount& owner);
  // Gives up some frames that lie where their owners may not have them, from `next` on, which moves on; how many more
  // of those that were looked at are pinned.
  uint32_t vacate(uint32_t& next, uint32_t end);
  // The owner's packs have frames in its arena alone; or where all have theirs, once more.
  void move_in(FrameAccount& owner, uint32_t arena);
  void move_out(FrameAccount& owner);
  // Everybody's again.
  void unreserve(uint32_t arena);

  // What must add up, counted in two ways at one moment: landed = valid + evicted, used = held = of all owners, and
  // each owner's frames = those found to be its.
  struct Census {
    uint64_t blocks_landed, blocks_evicted;  // since the start
    uint64_t blocks_valid, frames_held;      // found by looking at every frame
    uint64_t frames_used, frames_of_owners;
    uint64_t owners_miscounted;
  };
  Census census() const;

 private:
  struct Meta {
    PackFile* pack = nullptr;
    uint32_t extent = 0;
    uint32_t pins = 0;
    uint32_t held = 0;   // atomic: kLive while it has an extent, and how often it is held
    uint16_t valid = 0;  // read without the mutex as well
    uint16_t loading = 0;
  };
  static constexpr uint32_t kLive = 1u << 31;

  // `waits`: a run waits for it. Otherwise `above`: its owner's unused frames below that weight may go for it.
  struct Purpose {
    bool waits;
    uint8_t above;
  };
  Ahead acquire_cold(ExtentUse& use, uint8_t weight, uint8_t above);
  uint32_t take_frame(FrameAccount& owner, Purpose purpose);
  std::optional<uint32_t> cold_frame(FrameAccount& owner, Purpose purpose);
  void admit(uint32_t frame, const ExtentUse& use, uint8_t weight);
  // False: it is held just now.
  bool evict(uint32_t frame);
  bool give_up(uint32_t frame);
  bool at_rest(uint32_t frame) const;
  bool has_to_go(const PackFile& pack, uint32_t frame) const;
  void look(ExtentUse& use) const;
  void claim(ExtentUse& use, uint32_t blocks);
  uint32_t blocks_within(const ExtentUse& use, uint64_t first, uint64_t end) const;
  void pin(uint32_t frame, uint32_t count);
  void unpin(uint32_t frame, uint32_t count);
  void prefetch(const ExtentUse& use) const;
  uint32_t free_frame(const FrameAccount& owner);
  const FramePart& part_of(uint32_t frame) const;
  FramePart& part_of(uint32_t frame);
  // Whether the owner's packs may lie there.
  bool open_to(const FrameAccount& owner, uint32_t frame) const;
  void count_pinned(const FrameAccount& owner, int frames);
  uint32_t free_frames() const;

  const uint32_t extent_blocks_;
  const uint32_t count_;
  const uint32_t arena_frames_;
  const uint32_t arenas_end_;  // arena i ends i arenas before it
  Counters& counters_;
  AccessTrace accesses_;
  uint8_t* mapped_ = nullptr;  // as mmap returned it
  uint64_t mapped_bytes_ = 0;
  uint8_t* memory_ = nullptr;  // aligned to a huge page

  mutable std::mutex mutex_;
  std::vector<Meta> meta_;
  std::vector<FramePart> parts_;       // what is never an arena, then what may be
  std::atomic<uint32_t> reserved_{0};  // arenas
  // Written under the mutex: frames with a pin, of all owners and of those without an arena; frames of no arena.
  std::atomic<uint32_t> pinned_{0}, common_pinned_{0}, common_{0};
  std::map<uint32_t, FrameAccount> accounts_;
  std::atomic<uint64_t> releases_{0}, landings_{0};
  uint64_t blocks_landed_ = 0, blocks_evicted_ = 0;
  const std::unique_ptr<Policy> policy_;
  Domain everybody_{Domain::kCommon};  // frames whose owners have no arena
};

}  // namespace headgate
