#include "fuzz/shared_worker.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/probe.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // as g++ says it
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
extern "C" size_t __sanitizer_get_current_allocated_bytes();  // g++ 12 has the runtime without its headers
#endif

namespace headgate::fuzz {
namespace {

constexpr uint32_t kLooks = 100;
constexpr auto kBetweenLooks = std::chrono::milliseconds(1);

}  // namespace

SharedWorker::SharedWorker(DataPlane& plane, uint32_t owner, RingGeometry geometry, const char* window)
    : plane_(plane) {
  clear_window();
  id_ = plane.add_worker(window_.fd(), kWindowBytes, staging_.fd(), kStagingBytes, 1, owner, 0, window);
  if (Fd arena(plane.arena_descriptor(id_)); arena.get() >= 0) {
    struct stat info;
    require(fstat(arena.get(), &info) == 0, "an arena without a size");
    arena_ = std::make_unique<Mapping>(arena.get(), uint64_t(info.st_size), PROT_READ, "arena");
  }
  for (uint32_t i = 0; i < kRings; ++i) {
    rings_.push_back(std::make_unique<SharedRing>(geometry));
    const bool device = i > 0;  // its mark is scribbled over like everything else
    plane.add_ring(id_, rings_[i]->requests.fd(), rings_[i]->completions.fd(), geometry, device);
  }
  plane.serve_rings(id_);
}

SharedWorker::~SharedWorker() { plane_.remove_worker(id_); }

void SharedWorker::bind(const std::vector<uint32_t>& packs) {
  std::vector<LaneWindow> windows;
  for (uint32_t layer = 0; layer < kLayers; ++layer)
    for (uint32_t lane = 0; lane < kLanes; ++lane) windows.push_back({lane_offset(layer, lane), kPlaces});
  epoch_ = plane_.bind(id_, 0, packs, kLayers, kLanes, windows, kRecordBytes);
}

bool SharedWorker::window_is_clear() const {
  for (uint64_t at = 0; at < kWindowBytes; at += kProbeBytes)
    if (!is_clear(at)) return false;
  return true;
}

// Whether the line at this byte holds its canary, is a PROBE's, or a record that is right there. One may be stored at
// this moment: looks again.
bool SharedWorker::holds(uint64_t at, const std::function<bool(const Record&)>& right) const {
  for (uint32_t look = 0; look < kLooks; ++look, std::this_thread::sleep_for(kBetweenLooks)) {
    Record seen, probe;
    std::memcpy(&seen, window_.data() + at, sizeof seen);
    const uint64_t line = at / kProbeBytes;
    probe_line(seen.words[0] ^ probe_word(0, uint32_t(line * kProbeWords)), line, probe.words.data());
    if (seen == Record::canary() || seen == probe || right(seen)) return true;
  }
  return false;
}

bool SharedWorker::is_clear(uint64_t at) const {
  return holds(at, [](const Record&) { return false; });
}

Record SharedWorker::at(uint32_t layer, uint32_t lane, uint32_t place) const {
  Record r;
  std::memcpy(&r, window_.data() + lane_offset(layer, lane) + uint64_t{place} * kRecordBytes, sizeof r);
  return r;
}

void SharedWorker::check_window(uint32_t document, uint32_t records) const {
  uint64_t end = 0;
  auto gap_is_clean = [&](uint64_t until) {
    for (; end < until; end += kProbeBytes) require(is_clear(end), "a byte between the lanes was written");
  };
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      gap_is_clean(lane_offset(layer, lane));
      for (uint32_t place = 0; place < kPlaces; ++place) {
        const bool right = holds(lane_offset(layer, lane) + uint64_t{place} * kRecordBytes, [&](const Record& r) {
          const uint32_t id = r.words[0] & 0xffff;
          return id < records && r == Record::of(document, layer, lane, id);
        });
        require(right, "a place holds what is no record of its lane");
      }
      end = lane_offset(layer, lane) + kLaneBytes;
    }
  }
  gap_is_clean(kWindowBytes);
}

void SharedWorker::check_arena(uint32_t document, uint32_t records) const {
  const Record none{};
  for (uint64_t at = 0; arena_ && at < arena_->bytes(); at += sizeof none) {
    Record r;
    std::memcpy(&r, arena_->data() + at, sizeof r);
    const uint32_t word = r.words[0], layer = word >> 20 & 0xf, lane = word >> 16 & 0xf, id = word & 0xffff;
    bool own = layer < kLayers && lane < kLanes && id < records && r == Record::of(document, layer, lane, id);
    require(own || r == none, "an arena holds what is no record of its owner");
  }
}

uint64_t heap_bytes() {
#ifdef __SANITIZE_ADDRESS__
  return __sanitizer_get_current_allocated_bytes();
#else
  struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
#endif
}

}  // namespace headgate::fuzz
