// A registered worker: its memory, its rings and what its slots are bound to.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "store/pack_file.h"
#include "store/upload.h"
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

// What a slot's record ids and places mean. Records of kind 0 only.
class Binding {
 public:
  // FAILED_PRECONDITION: the packs differ in shape. INVALID_ARGUMENT: a lane leaves the window.
  Binding(std::vector<std::shared_ptr<PackFile>> packs, uint32_t layers, uint32_t lanes,
          std::vector<LaneWindow> windows, uint32_t record_bytes, uint64_t window_bytes);

  void append(std::shared_ptr<PackFile> pack);
  uint32_t records() const { return records_; }
  uint32_t record_bytes() const { return record_bytes_; }
  bool has_lane(uint32_t layer, uint32_t lane) const { return layer < layers_ && lane < lanes_; }
  const LaneWindow& window(uint32_t layer, uint32_t lane) const { return windows_[size_t{layer} * lanes_ + lane]; }
  PackFile& pack(uint32_t index) const { return *packs_[index]; }
  const std::shared_ptr<PackFile>& shared_pack(uint32_t index) const { return packs_[index]; }
  const std::vector<std::shared_ptr<PackFile>>& packs() const { return packs_; }
  RecordOrigin origin(uint32_t record) const {
    uint32_t index = pack_of_[record / kHashBlockTokens];
    uint32_t first = first_record_[index];
    return {index, first, first + packs_[index]->header().tokens};
  }

 private:
  void check_pack(const PackHeader& header) const;

  std::vector<std::shared_ptr<PackFile>> packs_;
  std::vector<uint32_t> first_record_;
  std::vector<uint32_t> pack_of_;  // by hash block: every pack holds whole ones
  uint32_t records_ = 0;
  uint32_t layers_, lanes_, record_bytes_;
  std::vector<LaneWindow> windows_;
};

struct Slot {
  uint32_t epoch = 0;  // of the latest bind
  std::optional<Binding> binding;
};

struct RingWork;
struct WorkerTurns;

// After construction everything but the two memories belongs to the copy thread that serves the worker.
struct Worker {
  Worker(uint32_t id, uint32_t owner, uint32_t engine, uint64_t run_ns_max, int window_fd, uint64_t window_bytes,
         int staging_fd, uint64_t staging_bytes, uint32_t slots);
  ~Worker();

  const uint32_t id;
  const uint32_t owner;       // its uid: rounds are fair among owners first
  const uint32_t engine;      // which copy thread serves it
  const uint64_t run_ns_max;  // a run that has waited this long is given up
  Window window;
  Mapping staging;
  std::vector<Slot> slots;
  std::unique_ptr<WorkerTurns> turns;
  std::vector<std::unique_ptr<RingWork>> rings;
  std::map<uint32_t, std::shared_ptr<Upload>> uploads;
  std::atomic<uint32_t> rings_made{0};
  bool closed = false;  // poisoned or removed: no ticket is taken any more
};

}  // namespace headgate
