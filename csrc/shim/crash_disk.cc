#include "shim/crash_disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

namespace headgate::shim {
namespace {

namespace fs = std::filesystem;

constexpr int kCrashed = 86;  // the status of a process whose disk has crashed
constexpr const char* kUnreadableFile = "/unreadable";

// The system's own calls: those of libc come back to the model.
int raw_open(const std::string& path, int flags) {
  return int(syscall(SYS_openat, AT_FDCWD, path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600));
}
ssize_t raw_read(int fd, void* to, uint64_t bytes, uint64_t offset) {
  return syscall(SYS_pread64, fd, to, bytes, offset);
}
// A model that cannot do its work proves nothing.
void must(bool done, const char* what) {
  if (done) return;
  std::perror(what);
  abort();
}
void raw_write(int fd, const void* from, uint64_t bytes, uint64_t offset) {
  must(syscall(SYS_pwrite64, fd, from, bytes, offset) == ssize_t(bytes), "write");
}
void raw_link(const std::string& from, const std::string& to) {
  must(syscall(SYS_linkat, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), 0) == 0, "link");
}
void raw_unlink(const std::string& path) { syscall(SYS_unlinkat, AT_FDCWD, path.c_str(), 0); }

struct stat stat_of(int fd) {
  struct stat info;
  must(fstat(fd, &info) == 0, "fstat");
  return info;
}

std::string parent(const std::string& path) { return path.substr(0, path.rfind('/')); }
bool is_below(const std::string& path, const std::string& directory) { return path.starts_with(directory + "/"); }

}  // namespace

uint64_t Draw::next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

CrashDisk::CrashDisk(CrashSettings settings) : settings_(std::move(settings)) {
  load_unreadable();
  for (const auto& entry : fs::directory_iterator(settings_.aside))  // of an earlier process
    if (entry.path() != settings_.aside + kUnreadableFile) raw_unlink(entry.path());
}

void CrashDisk::load_unreadable() {
  std::ifstream lines(settings_.aside + kUnreadableFile);
  uint64_t block;
  std::string path;
  while (lines >> block && std::getline(lines >> std::ws, path)) {
    int fd = raw_open(path, O_RDONLY);
    if (fd < 0) continue;
    opened(fd, path, false);
    file_of(fd)->unreadable.insert(block);
    close(fd);
  }
}

bool CrashDisk::covers(const char* path) const { return is_below(path, settings_.root); }
bool CrashDisk::covers_directory(const std::string& path) const {
  return path == settings_.root || covers(path.c_str());
}

CrashDisk::File* CrashDisk::file_of(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return nullptr;
  auto found = files_.find({info.st_dev, info.st_ino});
  return found == files_.end() ? nullptr : &found->second;
}

void CrashDisk::opened(int fd, const std::string& path, bool created) {
  struct stat info = stat_of(fd);
  if (!S_ISREG(info.st_mode)) return;
  Inode inode{info.st_dev, info.st_ino};
  if (created) files_.erase(inode);  // of a file that is gone
  if (files_.try_emplace(inode, File{met_, uint64_t(info.st_size), {}, {}}).second) ++met_;
  if (created) linked(path);
}

void CrashDisk::keep(int fd, File& file, uint64_t offset, uint64_t bytes) {
  for (uint64_t block = offset / kDiskBlockBytes; block * kDiskBlockBytes < offset + bytes; ++block) {
    if (file.before.count(block)) continue;
    std::vector<uint8_t> content(kDiskBlockBytes);
    ssize_t held = raw_read(fd, content.data(), kDiskBlockBytes, block * kDiskBlockBytes);
    content.resize(size_t(std::max<ssize_t>(held, 0)));
    file.before.emplace(block, std::move(content));
  }
}

void CrashDisk::keep_tail(int fd, File& file, uint64_t bytes) {
  uint64_t held = uint64_t(stat_of(fd).st_size);
  if (bytes < held) keep(fd, file, bytes, held - bytes);
  file.unreadable.erase(file.unreadable.lower_bound((bytes + kDiskBlockBytes - 1) / kDiskBlockBytes),
                        file.unreadable.end());
}

void CrashDisk::mend(File& file, uint64_t offset, uint64_t bytes) {
  auto first = file.unreadable.lower_bound((offset + kDiskBlockBytes - 1) / kDiskBlockBytes);
  auto last = file.unreadable.lower_bound((offset + bytes) / kDiskBlockBytes);
  if (offset + bytes >= (offset + kDiskBlockBytes - 1) / kDiskBlockBytes * kDiskBlockBytes)
    file.unreadable.erase(first, last);
}

uint64_t CrashDisk::readable(const File& file, uint64_t offset, uint64_t bytes) {
  auto bad = file.unreadable.lower_bound(offset / kDiskBlockBytes);
  if (bad == file.unreadable.end() || *bad * kDiskBlockBytes >= offset + bytes) return bytes;
  return *bad * kDiskBlockBytes <= offset ? 0 : *bad * kDiskBlockBytes - offset;
}

bool CrashDisk::writable(const File& file, uint64_t offset, uint64_t bytes) const {
  uint64_t end = offset + bytes;
  bool head = offset % kDiskBlockBytes != 0 && file.unreadable.count(offset / kDiskBlockBytes);
  bool tail = end % kDiskBlockBytes != 0 && file.unreadable.count(end / kDiskBlockBytes);
  return !head && !tail;
}

uint64_t CrashDisk::shortened(File& file, uint64_t offset, uint64_t bytes) {
  if (!(settings_.faults & kShort) || bytes <= kDiskBlockBytes) return bytes;
  Draw numbers = draw(file, offset);
  if (numbers.below(6) != 0) return bytes;
  return kSectorBytes * (1 + numbers.below((bytes - 1) / kSectorBytes));
}

void CrashDisk::synced(int fd, File& file) {
  file.before.clear();
  file.durable_bytes = uint64_t(stat_of(fd).st_size);
}

// A rename is one change, durable with either directory, and so is what was done to its names before.
void CrashDisk::synced_directory(const std::string& path) {
  std::set<std::string> durable;
  auto in_path = [&](const std::string& name) {
    return !name.empty() && (parent(name) == path || durable.count(name));
  };
  for (size_t i = names_.size(); i-- > 0;) {
    const Name& name = names_[i];
    if (!in_path(name.to) && !in_path(name.from)) continue;
    durable.insert({name.to, name.from});
    if (!name.aside.empty()) raw_unlink(name.aside);
    names_.erase(names_.begin() + long(i));
  }
}

void CrashDisk::made_directory(const std::string& path) { names_.push_back({Name::kMade, "", path, ""}); }
void CrashDisk::linked(const std::string& path) { names_.push_back({Name::kLinked, "", path, ""}); }
void CrashDisk::unlinked(const std::string& path, std::string aside) {
  names_.push_back({Name::kUnlinked, "", path, std::move(aside)});
}
void CrashDisk::renamed(const std::string& from, const std::string& to, std::string aside) {
  names_.push_back({Name::kRenamed, from, to, std::move(aside)});
}

std::string CrashDisk::set_aside(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return "";
  std::string aside = settings_.aside + "/" + std::to_string(++asides_);
  raw_link(path, aside);
  return aside;
}

// Changes of the same names stay in their order: of those a crash leaves the first ones. Nothing is left in a directory
// that is not.
std::vector<bool> CrashDisk::kept_names(Draw& draw) const {
  enum { kAll, kNone, kFirst, kEach };
  const uint64_t mode = settings_.faults & kOldNames ? draw.below(4) : uint64_t{kAll};
  const size_t first = draw.below(names_.size() + 1);
  std::vector<bool> kept(names_.size());
  std::set<std::string> lost;
  for (size_t i = 0; i < names_.size(); ++i) {
    const Name& name = names_[i];
    bool keeps = mode == kAll || (mode == kFirst && i < first) || (mode == kEach && draw.below(2) == 0);
    bool follows = lost.count(name.to) || lost.count(name.from);
    auto holds = [&](const std::string& directory) { return is_below(name.to, directory); };
    kept[i] = keeps && !follows && std::none_of(lost.begin(), lost.end(), holds);
    if (kept[i]) continue;
    lost.insert(name.to);
    if (!name.from.empty()) lost.insert(name.from);
  }
  return kept;
}

void CrashDisk::undo(const Name& name) {
  switch (name.kind) {
    case Name::kMade:
      fs::remove_all(name.to);
      return;
    case Name::kLinked:
      return raw_unlink(name.to);
    case Name::kUnlinked:
      break;
    case Name::kRenamed:
      must(syscall(SYS_renameat2, AT_FDCWD, name.to.c_str(), AT_FDCWD, name.from.c_str(), 0) == 0, name.from.c_str());
  }
  if (!name.aside.empty()) raw_link(name.aside, name.to);
}

void CrashDisk::crash_names(Draw& draw) {
  std::vector<bool> kept = kept_names(draw);
  for (size_t i = names_.size(); i-- > 0;)
    if (!kept[i]) undo(names_[i]);
}

uint64_t CrashDisk::crash_size(const File& file, uint64_t now_bytes, Draw& draw, Mood mood) const {
  if (file.durable_bytes == now_bytes || !(settings_.faults & kOldSizes) || mood == Mood::kMostlyNew) return now_bytes;
  uint64_t least = std::min(file.durable_bytes, now_bytes), most = std::max(file.durable_bytes, now_bytes);
  uint64_t sizes[] = {now_bytes, file.durable_bytes, least + draw.below(most - least + 1)};
  return sizes[mood == Mood::kMostlyOld ? 1 : draw.below(std::size(sizes))];
}

// What is left of a block. True: an error for whoever reads it.
bool CrashDisk::crash_block(int fd, const std::vector<uint8_t>& before, uint64_t block, Draw& draw, Mood mood) {
  std::vector<uint32_t> fates{0};
  for (uint32_t fault : {kOldBlocks, kGarbageBlocks, kTornBlocks, kUnreadableBlocks})
    if (settings_.faults & fault) fates.push_back(fault);
  uint32_t fate = fates[draw.below(fates.size())];
  if (mood != Mood::kMixed && draw.below(4) != 0) fate = mood == Mood::kMostlyOld ? settings_.faults & kOldBlocks : 0;
  if (fate == 0) return false;
  std::vector<uint8_t> old = before, content(kDiskBlockBytes);
  old.resize(kDiskBlockBytes);
  raw_read(fd, content.data(), kDiskBlockBytes, block * kDiskBlockBytes);
  if (fate == kOldBlocks) {
    content = old;
  } else if (fate == kTornBlocks) {
    uint64_t split = kSectorBytes * (1 + draw.below(kDiskBlockBytes / kSectorBytes - 1));
    auto [first, last] = draw.below(2) ? std::pair(uint64_t{0}, split) : std::pair(split, kDiskBlockBytes);
    std::copy(old.begin() + long(first), old.begin() + long(last), content.begin() + long(first));
  } else {
    const uint64_t kind = draw.below(4);
    for (uint8_t& byte : content) byte = kind == 0 ? 0 : kind == 1 ? 0xff : uint8_t(draw.next());
  }
  raw_write(fd, content.data(), kDiskBlockBytes, block * kDiskBlockBytes);
  return fate == kUnreadableBlocks;
}

void CrashDisk::crash_file(const std::string& path, Draw& draw, Mood mood) {
  int fd = raw_open(path, O_RDWR);
  must(fd >= 0, path.c_str());
  if (File* file = file_of(fd)) {
    uint64_t bytes = crash_size(*file, uint64_t(stat_of(fd).st_size), draw, mood);
    for (const auto& [block, before] : file->before) {
      file->unreadable.erase(block);
      if (crash_block(fd, before, block, draw, mood)) file->unreadable.insert(block);
    }
    must(syscall(SYS_ftruncate, fd, bytes) == 0, "ftruncate");
    std::ofstream lines(settings_.aside + kUnreadableFile, std::ios::app);
    for (uint64_t block : file->unreadable)
      if (block * kDiskBlockBytes < bytes) lines << block << ' ' << path << '\n';
    file->before.clear();
    file->unreadable.clear();  // another name of it has nothing to add
  }
  syscall(SYS_close, fd);
}

void CrashDisk::crash() {
  Draw draw(settings_.seed, UINT32_MAX, steps_);
  crash_names(draw);
  const Mood mood = Mood(draw.below(3));
  std::vector<std::string> paths;
  for (const auto& entry : fs::recursive_directory_iterator(settings_.root))
    if (entry.is_regular_file()) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  raw_unlink(settings_.aside + kUnreadableFile);
  for (const std::string& path : paths) crash_file(path, draw, mood);
  _exit(kCrashed);
}

}  // namespace headgate::shim
