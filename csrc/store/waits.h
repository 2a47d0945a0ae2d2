// Where the time of runs went: by operation, and by lane where they stood still.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ring.h"

namespace headgate {

// Queue: for its turn, behind other tickets and rings. Pins: planning, frames and planning memory. Disk: its transfers,
// or another run's read of the same blocks. Copy: into the window. Commit: fence, cell and wake.
enum class Wait : uint8_t { kQueue, kPins, kDisk, kCopy, kCommit, kCount };

// Of one run, in the hands of its copy thread.
struct Spent {
  uint64_t ns[size_t(Wait::kCount)];
  uint64_t since_ns;
  Wait wait;
  bool stalled;  // it has waited for the disk or for frames
  uint32_t hits, misses;
  uint64_t read_bytes;

  void begin(uint64_t now) { *this = {.ns = {}, .since_ns = now, .wait = Wait::kQueue}; }
  // What it waits for from `now` on.
  void turn(Wait next, uint64_t now) {
    if (now > since_ns) ns[size_t(wait)] += now - since_ns, since_ns = now;
    wait = next;
  }
};

// Runs of a slot, or the STORE runs of a worker, since it was bound. Each copy thread writes a part of its own, without
// a lock; any thread reads. What is counted of stalls by lane is common: the disk has taken longer.
class Waits {
 public:
  enum Op : uint8_t { kGather, kRange, kStore, kOps };
  using Count = std::atomic<uint64_t>;

  struct OpWaits {
    Count ns[size_t(Wait::kCount)] = {};
    Count runs{0}, failed{0}, slowest_ns{0}, hits{0}, misses{0}, read_bytes{0}, moved_bytes{0};
  };
  struct OpTotals {
    std::array<uint64_t, size_t(Wait::kCount)> ns;
    uint64_t runs, failed, slowest_ns, hits, misses, read_bytes, moved_bytes;
  };
  struct Stalls {
    uint32_t layer, lane;
    uint64_t stalls, ns, slowest_ns;
  };

  // May throw std::bad_alloc.
  Waits(uint32_t threads, uint32_t layers, uint32_t lanes)
      : parts_(threads), lanes_(lanes), stalls_(size_t{layers} * lanes) {}

  // A run has ended; returns where its commit is still to be added.
  OpWaits& record(uint32_t thread, headgate::Op op, const Spent& spent, bool failed, uint64_t moved_bytes) {
    OpWaits& w = parts_[thread].ops[index(op)];
    uint64_t whole = 0;
    for (size_t i = 0; i < std::size(spent.ns); ++i) add(w.ns[i], spent.ns[i]), whole += spent.ns[i];
    add(w.runs, 1);
    add(w.failed, failed);
    add(w.hits, spent.hits);
    add(w.misses, spent.misses);
    add(w.read_bytes, spent.read_bytes);
    add(w.moved_bytes, moved_bytes);
    raise(w.slowest_ns, whole);
    return w;
  }
  static void commit(OpWaits& waits, uint64_t ns) { add(waits.ns[size_t(Wait::kCommit)], ns); }
  // Of a lane that the slot has.
  void record_stall(uint32_t layer, uint32_t lane, uint64_t ns) {
    Lane& at = stalls_[size_t{layer} * lanes_ + lane];
    at.stalls.fetch_add(1, std::memory_order_relaxed);
    at.ns.fetch_add(ns, std::memory_order_relaxed);
    const uint32_t us = uint32_t(std::min<uint64_t>(ns / 1000, UINT32_MAX));
    uint32_t slowest = at.slowest_us.load(std::memory_order_relaxed);
    while (us > slowest && !at.slowest_us.compare_exchange_weak(slowest, us, std::memory_order_relaxed)) {
    }
  }

  OpTotals totals(Op op) const {
    OpTotals sum{};
    for (const Part& part : parts_) {
      const OpWaits& w = part.ops[op];
      for (size_t i = 0; i < sum.ns.size(); ++i) sum.ns[i] += w.ns[i];
      sum.runs += w.runs, sum.failed += w.failed, sum.hits += w.hits, sum.misses += w.misses;
      sum.read_bytes += w.read_bytes, sum.moved_bytes += w.moved_bytes;
      sum.slowest_ns = std::max<uint64_t>(sum.slowest_ns, w.slowest_ns);
    }
    return sum;
  }
  // Those that stood still longest in all, the longest first.
  std::vector<Stalls> worst(size_t most) const {
    std::vector<Stalls> found;
    for (size_t i = 0; i < stalls_.size(); ++i) {
      const Lane& at = stalls_[i];
      if (at.stalls > 0)
        found.push_back({uint32_t(i / lanes_), uint32_t(i % lanes_), at.stalls, at.ns, at.slowest_us * uint64_t{1000}});
    }
    const size_t shown = std::min(most, found.size());
    std::partial_sort(found.begin(), found.begin() + ptrdiff_t(shown), found.end(),
                      [](const Stalls& a, const Stalls& b) { return a.ns > b.ns; });
    found.resize(shown);
    return found;
  }

 private:
  struct alignas(64) Part {
    OpWaits ops[kOps];
  };
  struct Lane {
    std::atomic<uint32_t> stalls{0}, slowest_us{0};
    std::atomic<uint64_t> ns{0};
  };

  static Op index(headgate::Op op) {
    return op == headgate::Op::kGather ? kGather : op == headgate::Op::kRange ? kRange : kStore;
  }
  // One thread writes: no bus lock is needed.
  static void add(Count& count, uint64_t n) {
    count.store(count.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  static void raise(Count& count, uint64_t to) {
    if (to > count.load(std::memory_order_relaxed)) count.store(to, std::memory_order_relaxed);
  }

  std::vector<Part> parts_;
  const uint32_t lanes_;
  std::vector<Lane> stalls_;
};

}  // namespace headgate
