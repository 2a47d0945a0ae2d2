// A worker as the fuzzer holds it: its memories mapped for writing, and records that say where they belong.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/pack.h"
#include "core/pull.h"
#include "core/ring.h"
#include "store/data_plane.h"
#include "store/mapping.h"

namespace headgate::fuzz {

inline constexpr uint32_t kLayers = 2, kLanes = 2, kRecordBytes = 64;
inline constexpr uint32_t kPlaces = 300, kGap = 4096;
inline constexpr uint64_t kLaneBytes = kPlaces * kRecordBytes;
inline constexpr uint64_t kWindowBytes = kLayers * kLanes * (kLaneBytes + kGap);
inline constexpr uint32_t kSegmentTokens = 512;  // at most
inline constexpr uint64_t kStagingBytes = 10 * kBlockBytes;
inline constexpr uint8_t kCanary = 0xc5;
inline constexpr uint32_t kRings = 2;
static_assert(kStagingBytes >= kSegmentTokens * (kRecordBytes + sizeof(uint16_t)));

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_requests: %s\n", what);
  std::abort();
}

inline int memory(uint64_t bytes) {
  int fd = memfd_create("fuzz", MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, off_t(bytes)) == 0, "memfd_create failed");
  return fd;
}

// A record: sixteen times where it belongs, so that a record in a wrong place, or a torn one, shows.
struct Record {
  std::array<uint32_t, kRecordBytes / sizeof(uint32_t)> words;

  static Record of(uint32_t document, uint32_t layer, uint32_t lane, uint32_t id) {
    Record r;
    r.words.fill((document + 1) << 24 | layer << 20 | lane << 16 | id);
    return r;
  }
  static Record canary() {
    Record r;
    std::memset(&r, kCanary, sizeof r);
    return r;
  }
  bool operator==(const Record&) const = default;
};
static_assert(sizeof(Record) == kRecordBytes);

// Memory that both sides map.
class Shared {
 public:
  explicit Shared(uint64_t bytes) : fd_(memory(bytes)), mapping_(fd_.get(), bytes, PROT_READ | PROT_WRITE, "fuzz") {}
  int fd() const { return fd_.get(); }
  uint8_t* data() const { return mapping_.data(); }
  uint64_t bytes() const { return mapping_.bytes(); }

 private:
  Fd fd_;
  Mapping mapping_;
};

struct SharedRing {
  explicit SharedRing(RingGeometry g)
      : layout{g}, requests(layout.requests_bytes()), completions(layout.completions_bytes()) {}
  const RingLayout layout;
  Shared requests, completions;
};

// Registered for as long as it lives; slot 0 is bound to `packs`, which hold one document's records in order.
class SharedWorker {
 public:
  SharedWorker(DataPlane& plane, uint32_t owner, RingGeometry geometry, const char* window);
  ~SharedWorker();

  uint32_t id() const { return id_; }
  uint32_t epoch() const { return epoch_; }
  SharedRing& ring(uint32_t index) { return *rings_[index]; }
  uint8_t* staging() const { return staging_.data(); }
  void bind(const std::vector<uint32_t>& packs);
  void unbind() { plane_.unbind(id_, 0); }

  // Aborts unless every place of every lane holds its canary, a whole record of that lane of `document` or a PROBE's
  // line, and nothing but those lines was written between the lanes.
  void check_window(uint32_t document, uint32_t records) const;
  // Aborts unless all that it can read in its arena is records of `document`.
  void check_arena(uint32_t document, uint32_t records) const;
  Record at(uint32_t layer, uint32_t lane, uint32_t place) const;
  // But for lines of PROBEs, which no unbind ends.
  bool window_is_clear() const;
  void clear_window() { std::memset(window_.data(), kCanary, window_.bytes()); }

 private:
  bool holds(uint64_t at, const std::function<bool(const Record&)>& right) const;
  bool is_clear(uint64_t at) const;
  static uint64_t lane_offset(uint32_t layer, uint32_t lane) {
    return (uint64_t{layer} * kLanes + lane) * (kLaneBytes + kGap) + kGap / 2;
  }

  DataPlane& plane_;
  Shared window_{PullLayout{kWindowBytes}.memory_bytes()}, staging_{kStagingBytes};
  std::unique_ptr<Mapping> arena_;
  std::vector<std::unique_ptr<SharedRing>> rings_;
  uint32_t id_, epoch_ = 0;
};

// Where the daemon may not go beyond: bytes that the process holds on its heap.
uint64_t heap_bytes();

}  // namespace headgate::fuzz
