// A registered worker: its memory, and what its slots are bound to.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "store/arenas.h"
#include "store/control.h"
#include "store/pack_file.h"
#include "store/pull_window.h"
#include "store/upload.h"
#include "store/waits.h"
#include "store/window.h"

namespace headgate {

struct LaneWindow {
  uint64_t offset;  // of place 0 in the window, bytes
  uint64_t places;
};

// Where a record id lies.
struct RecordOrigin {
  uint32_t pack;   // index in the binding
  uint32_t first;  // the pack's first record
  uint32_t end;
};

// A pack that cannot be closed, because a slot is bound to it.
class BoundPack {
 public:
  explicit BoundPack(std::shared_ptr<PackFile> file) : file_(std::move(file)) { ++file_->bound; }
  BoundPack(const BoundPack& other) : BoundPack(other.file_) {}
  BoundPack& operator=(const BoundPack&) = delete;
  ~BoundPack() { --file_->bound; }

  const std::shared_ptr<PackFile>& file() const { return file_; }

 private:
  const std::shared_ptr<PackFile> file_;
};

// What a slot's record ids and places mean. Records of kind 0 only. Shared by threads once it is in a slot, so it does
// not change any more: another pack makes another binding.
class Binding {
 public:
  // FAILED_PRECONDITION: the packs differ in shape. INVALID_ARGUMENT: a lane leaves the window.
  Binding(const std::vector<BoundPack>& packs, uint32_t layers, uint32_t lanes, std::vector<LaneWindow> windows,
          uint32_t record_bytes, uint64_t window_bytes);

  void append(const BoundPack& pack);
  uint32_t records() const { return records_; }
  uint32_t record_bytes() const { return record_bytes_; }
  bool has_lane(uint32_t layer, uint32_t lane) const { return layer < layers_ && lane < lanes_; }
  const LaneWindow& window(uint32_t layer, uint32_t lane) const { return windows_[size_t{layer} * lanes_ + lane]; }
  PackFile& pack(uint32_t index) const { return *packs_[index].file(); }
  const std::shared_ptr<PackFile>& shared_pack(uint32_t index) const { return packs_[index].file(); }
  RecordOrigin origin(uint32_t record) const {
    uint32_t index = pack_of_[record / kHashBlockTokens];
    uint32_t first = first_record_[index];
    return {index, first, first + pack(index).header().tokens};
  }

 private:
  void check_pack(const PackHeader& header) const;

  std::vector<BoundPack> packs_;
  std::vector<uint32_t> first_record_;
  std::vector<uint32_t> pack_of_;  // by hash block: every pack holds whole ones
  uint32_t records_ = 0;
  uint32_t layers_, lanes_, record_bytes_;
  std::vector<LaneWindow> windows_;
};

struct Slot {
  uint32_t epoch = 0;  // of the latest bind
  std::shared_ptr<const Binding> binding;
  std::shared_ptr<Waits> waits;  // of this epoch
};

class RingConsumer;
struct Shard;

// Its rings may be served by different copy threads, each of which has a shard. `slots`, `uploads` and `rings` are the
// control plane's, guarded by `control`; what a call changes there it changes in every shard before it returns.
struct Worker {
  Worker(uint32_t id, uint32_t owner, uint32_t home, uint32_t threads, uint64_t run_ns_max,
         std::unique_ptr<Window> window, uint64_t window_bytes, int staging_fd, uint64_t staging_bytes, uint32_t slots);
  ~Worker();
  // FAILED_PRECONDITION: it is poisoned; the slot is not bound.
  void check_open() const;
  void check_bound(uint32_t slot) const;

  const uint32_t id;
  const uint32_t owner;       // its uid: rounds are fair among owners first
  const uint32_t home;        // the copy thread that its rings are spread from
  const uint64_t run_ns_max;  // a run that has waited this long is given up
  const std::unique_ptr<Window> window;
  PullWindow* const pull;             // the same, if its device reads frames itself
  std::unique_ptr<ArenaShare> arena;  // then; as long as runs go on
  const uint64_t window_bytes;
  Mapping staging;
  Waits stores;                     // of its STORE runs
  std::atomic<bool> closed{false};  // poisoned or removed: every thread ends its shard as soon as it sees this

  Control control;  // may be held while waiting for copy threads, so never by one
  std::vector<Slot> slots;
  std::map<uint32_t, std::shared_ptr<Upload>> uploads;
  std::vector<std::unique_ptr<RingConsumer>> unserved;  // rings that no copy thread looks at yet
  std::vector<uint32_t> rings;                          // the copy thread that serves each
  std::vector<std::unique_ptr<Shard>> shards;  // by copy thread, which owns what is in it; made with its first ring
};

}  // namespace headgate
