// What one copy thread knows of a worker: the rings that it serves, what slots are bound to, the uploads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/ring.h"
#include "store/worker.h"

namespace headgate {

struct RingWork;
struct WorkerTurns;

// Belongs to that thread; every thread that serves a ring of the worker has one. Between calls of the control plane
// slots and uploads are the same in all of them.
struct Shard {
  Shard(Worker& worker, std::unique_ptr<WorkerTurns> turns);
  ~Shard();
  // Gives up slots and uploads, on any thread, once the worker is removed from this one: many of them take long.
  void let_go();

  Worker& worker;
  std::vector<Slot> slots;
  std::map<uint32_t, std::shared_ptr<Upload>> uploads;
  std::unique_ptr<WorkerTurns> turns;
  std::vector<std::unique_ptr<RingWork>> rings;
  bool closed = false;    // no ticket is taken and no run goes on any more
  bool unfenced = false;  // something was delivered behind which no fence stands

  // What is being given up, ring by ring: none of its runs begins any more.
  struct Leaving {
    bool upload;  // or a slot
    uint32_t number;
    size_t ring;  // those before it have none of its runs
    bool has(const Run& run, Op op) const {
      return op != Op::kProbe && upload == (op == Op::kStore) && number == run.slot;
    }
  };
  std::optional<Leaving> leaving;
};

}  // namespace headgate
