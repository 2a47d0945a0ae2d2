// What a disk would keep if the power went now: every block written, every size and name changed since the last sync,
// as it was before and as it is. A crash makes of each of them what the faults of this run allow, and ends the process.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace headgate::shim {

inline constexpr uint64_t kDiskBlockBytes = 4096;
inline constexpr uint64_t kSectorBytes = 512;  // that are written whole or not at all

// Bits. Blocks that were written since the last sync are, each for itself: as they were before, garbage, new up to some
// sector and old behind it or the other way round, or an error for whoever reads them; or new. Sizes and names are old.
// kShort: transfers end early. kShuffled: those of a ring happen and end in any order, or late.
enum CrashFault : uint32_t {
  kOldBlocks = 1,
  kGarbageBlocks = 2,
  kTornBlocks = 4,
  kUnreadableBlocks = 8,
  kOldSizes = 16,
  kOldNames = 32,
  kShort = 64,
  kShuffled = 128,
};

struct CrashSettings {
  std::string root;   // the directory below which the model holds
  std::string aside;  // a directory of its own on the same file system
  uint64_t seed;
  uint64_t crash_at;  // the crash comes with that change or sync, from 1; 0: never by itself
  uint32_t faults;
};

// Numbers that depend on the seed and on where they are drawn, not on which thread comes first.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t place, uint64_t count) : state_(seed * 0x9e3779b97f4a7c15 + (place << 32) + count) {}
  uint64_t next();
  uint64_t below(uint64_t limit) { return next() % limit; }

 private:
  uint64_t state_;
};

// For one caller at a time. Paths are absolute and without links.
class CrashDisk {
 public:
  explicit CrashDisk(CrashSettings settings);

  struct File {
    uint64_t number;                                  // in the order in which they were met
    uint64_t durable_bytes;                           // its size at the last sync
    std::map<uint64_t, std::vector<uint8_t>> before;  // blocks written since, as they were; short at the file's end
    std::set<uint64_t> unreadable;                    // blocks
    std::map<uint64_t, uint64_t> transfers = {};      // how many there were at each offset
  };

  bool covers(const char* path) const;
  bool covers_directory(const std::string& path) const;
  // Null: a file outside, one without a name, or no file.
  File* file_of(int fd);
  // A file below the root was opened; `created` by that.
  void opened(int fd, const std::string& path, bool created);
  // Before bytes are overwritten, or a file is cut to `bytes`.
  void keep(int fd, File& file, uint64_t offset, uint64_t bytes);
  void keep_tail(int fd, File& file, uint64_t bytes);
  // Whole blocks that were overwritten can be read again.
  void mend(File& file, uint64_t offset, uint64_t bytes);
  // How much can be read before a block that cannot; whether a write needs no part of such a block; how much of a
  // transfer happens.
  uint64_t readable(const File& file, uint64_t offset, uint64_t bytes);
  bool writable(const File& file, uint64_t offset, uint64_t bytes) const;
  uint64_t shortened(File& file, uint64_t offset, uint64_t bytes);
  Draw draw(File& file, uint64_t offset) {
    return Draw(settings_.seed, file.number, offset << 8 | ++file.transfers[offset]);
  }
  bool shuffles() const { return settings_.faults & kShuffled; }

  void synced(int fd, File& file);
  void synced_directory(const std::string& path);

  // Names that have changed. A file that loses its name is set aside first, so that the name may come back.
  void made_directory(const std::string& path);
  void linked(const std::string& path);
  std::string set_aside(const std::string& path);  // empty: there is none
  void unlinked(const std::string& path, std::string aside);
  void renamed(const std::string& from, const std::string& to, std::string aside);

  void step() {
    if (++steps_ == settings_.crash_at) crash();
  }
  [[noreturn]] void crash();
  void crash_within(uint64_t steps) { settings_.crash_at = steps_ + steps; }

 private:
  struct Name {
    enum Kind { kMade, kLinked, kUnlinked, kRenamed } kind;
    std::string from, to;
    std::string aside;  // the file that had the name before
  };
  using Inode = std::pair<dev_t, ino_t>;
  enum class Mood { kMixed, kMostlyOld, kMostlyNew };  // crashes differ in how much they leave

  void load_unreadable();
  std::vector<bool> kept_names(Draw& draw) const;
  void undo(const Name& name);
  void crash_names(Draw& draw);
  void crash_file(const std::string& path, Draw& draw, Mood mood);
  uint64_t crash_size(const File& file, uint64_t now_bytes, Draw& draw, Mood mood) const;
  bool crash_block(int fd, const std::vector<uint8_t>& before, uint64_t block, Draw& draw, Mood mood);

  CrashSettings settings_;
  std::map<Inode, File> files_;
  std::vector<Name> names_;
  uint64_t steps_ = 0, asides_ = 0, met_ = 0;
};

}  // namespace headgate::shim
