#include "store/arenas.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "ring/futex.h"

namespace headgate {
namespace {

constexpr auto kControlDeadline = std::chrono::seconds(10);
constexpr uint64_t kMakeNs = 5'000'000'000;           // for runs that use frames where an arena is to be
constexpr uint64_t kEndNs = 1'000'000'000;            // for reads of the owner's that are in flight
constexpr auto kNap = std::chrono::microseconds(50);  // lets copy threads have the frames' mutex
constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kForgetBytes = 32 << 20;  // whoever faults waits while pages go

Fd sealed_later(uint64_t bytes) {
  Fd memory(memfd_create("kvstore-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0 || ftruncate(memory.get(), off_t(bytes)) != 0) throw system_error("arena: memfd", errno);
  return memory;
}

}  // namespace

class Arenas::Share : public ArenaShare {
 public:
  Share(Arenas& arenas, uint32_t owner, const Arena& arena)
      : ArenaShare(arenas.frames_.first_frame(arena.number), arenas.frames_.arena_frames(),
                   arenas.frames_.frame_bytes()),
        arenas_(arenas),
        owner_(owner),
        memory_(arena.memory.get()) {}
  ~Share() override { arenas_.leave(owner_); }

  int descriptor() const override {
    const int copy = fcntl(memory_, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw system_error("arena: dup", errno);
    return copy;
  }

 private:
  Arenas& arenas_;
  const uint32_t owner_;
  const int memory_;  // the arena's, which outlives its shares
};

std::unique_ptr<ArenaShare> Arenas::join(uint32_t owner) {
  std::unique_lock control(control_, kControlDeadline);
  if (!control) throw resource_exhausted("another arena is being made or given back; try again");
  end_unshared();
  if (!made_.contains(owner)) make(owner);
  Arena& arena = made_.at(owner);
  if (arena.ending)
    throw resource_exhausted("the last arena of user " + std::to_string(owner) +
                             " is still read into; is the disk stuck?");
  auto share = std::make_unique<Share>(*this, owner, arena);
  std::lock_guard lock(mutex_);
  ++arena.shares;
  return share;
}

uint32_t Arenas::count() const {
  std::lock_guard lock(mutex_);
  return uint32_t(made_.size());
}

void Arenas::make(uint32_t owner) {
  FrameAccount& account = frames_.account(owner);
  if (frames_.arenas() == 0)
    throw resource_exhausted("no arena of " + std::to_string(bytes()) + " B fits into the DRAM tier of " +
                             std::to_string(frames_.count()) + " frames; lower arena_bytes or raise dram_bytes");
  Arena arena{frames_.reserve(account), {}};
  if (arena.number == frames_.arenas())
    throw resource_exhausted("all " + std::to_string(frames_.arenas()) + " arenas of " + std::to_string(bytes()) +
                             " B are taken by other users; a smaller arena_bytes makes more of them");
  try {
    if (!vacate(arena, kMakeNs))
      throw resource_exhausted("runs do not let go of the memory for an arena; is the disk stuck?");
    arena.memory = sealed_later(bytes());
    map(arena, MAP_SHARED);
    // From here on only the mapping above can write.
    if (fcntl(arena.memory.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
      throw system_error("arena: seals", errno);
    std::lock_guard lock(mutex_);
    made_.emplace(owner, Arena{arena.number, std::move(arena.memory)});
  } catch (...) {
    try {
      if (arena.memory.get() >= 0) map(arena, MAP_PRIVATE | MAP_ANONYMOUS);
    } catch (const Error&) {
      // The frames stay in memory that nobody else was given.
    }
    frames_.unreserve(arena.number);
    throw;
  }
  frames_.move_in(account, arena.number);
  for (uint32_t next = 0; next < frames_.count(); std::this_thread::sleep_for(kNap))
    frames_.vacate(next, frames_.count());
}

void Arenas::leave(uint32_t owner) {
  {
    std::lock_guard lock(mutex_);
    if (--made_.at(owner).shares > 0) return;
  }
  try {
    give_back();
  } catch (const Error&) {
    // The next call does, or says why not: this is a destructor's.
  }
}

void Arenas::give_back() {
  if (std::unique_lock control(control_, kControlDeadline); control) end_unshared();
}

void Arenas::end_unshared() {
  for (auto at = made_.begin(); at != made_.end();) {
    auto& [owner, arena] = *at++;
    {
      std::lock_guard lock(mutex_);
      if (arena.shares > 0) continue;
    }
    if (!std::exchange(arena.ending, true)) frames_.move_out(frames_.account(owner));
    if (!vacate(arena, kEndNs)) continue;
    map(arena, MAP_PRIVATE | MAP_ANONYMOUS);
    frames_.unreserve(arena.number);
    std::lock_guard lock(mutex_);
    made_.erase(std::prev(at));
  }
}

// Until no frame of it holds anything; false if that takes too long.
bool Arenas::vacate(const Arena& arena, uint64_t patience_ns) {
  const uint32_t first = frames_.first_frame(arena.number), end = first + frames_.arena_frames();
  for (const uint64_t deadline_ns = now_ns() + patience_ns;;) {
    uint32_t pinned = 0;
    for (uint32_t next = first; next < end; std::this_thread::sleep_for(kNap)) pinned += frames_.vacate(next, end);
    if (pinned == 0) return true;
    if (now_ns() >= deadline_ns) return false;
  }
}

// Other memory in its place.
void Arenas::map(const Arena& arena, int flags) const {
  uint8_t* const at = memory(arena);
  for (uint64_t done = 0; done < bytes(); done += kForgetBytes)
    madvise(at + done, std::min(kForgetBytes, bytes() - done), MADV_DONTNEED);
  const int fd = flags & MAP_ANONYMOUS ? -1 : arena.memory.get();
  if (mmap(at, bytes(), PROT_READ | PROT_WRITE, flags | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED)
    throw system_error("arena: mmap", errno);
  if (bytes() % kHugePage == 0) madvise(at, bytes(), MADV_HUGEPAGE);  // where the kernel allows it; slower without
}

}  // namespace headgate
