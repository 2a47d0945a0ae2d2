// Parts of the DRAM tier that one owner has to itself, in memory that its workers map for reading.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "store/control.h"
#include "store/mapping.h"
#include "store/tier/frames.h"

namespace headgate {

// An owner's arena as one worker has it.
class ArenaShare {
 public:
  virtual ~ArenaShare() = default;

  bool has(uint32_t frame) const { return frame - first_ < count_; }
  // Bytes from the arena's start; for frames that it has.
  uint64_t offset(uint32_t frame) const { return uint64_t{frame - first_} * frame_bytes_; }
  uint32_t frames() const { return count_; }
  // A new descriptor of its memory, the caller's: it cannot be mapped for writing, grown or shrunk.
  virtual int descriptor() const = 0;

 protected:
  ArenaShare(uint32_t first, uint32_t count, uint32_t frame_bytes)
      : first_(first), count_(count), frame_bytes_(frame_bytes) {}

 private:
  const uint32_t first_, count_, frame_bytes_;
};

// An arena lies where frames of everybody lay: as long as it is there, they have so many fewer.
class Arenas {
 public:
  explicit Arenas(Frames& frames) : frames_(frames) {}

  // The owner's arena, made if need be; it goes with its last share. Waits for runs that use frames where it is to be.
  // RESOURCE_EXHAUSTED: there is no room for one more, or runs do not let go of it: there are other windows.
  std::unique_ptr<ArenaShare> join(uint32_t owner);
  // Of arenas whose last share has gone, those that reads were still in flight to then. Waits a second for each.
  void give_back();
  uint32_t count() const;

 private:
  struct Arena {
    uint32_t number;
    Fd memory;
    uint32_t shares = 0;
    bool ending = false;
  };
  class Share;

  void make(uint32_t owner);
  void leave(uint32_t owner);
  void end_unshared();
  bool vacate(const Arena& arena, uint64_t patience_ns);
  uint8_t* memory(const Arena& arena) const { return frames_.address(frames_.first_frame(arena.number)); }
  uint64_t bytes() const { return uint64_t{frames_.arena_frames()} * frames_.frame_bytes(); }
  void map(const Arena& arena, int flags) const;

  Frames& frames_;
  Control control_;  // one call at a time, while it waits too
  mutable std::mutex mutex_;
  std::map<uint32_t, Arena> made_;  // by owner; changed with both locks held, shares with this one
};

}  // namespace headgate
