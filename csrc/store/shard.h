// What one copy thread knows of a worker: the rings that it serves, what slots are bound to, the uploads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "store/worker.h"

namespace headgate {

struct RingWork;
struct WorkerTurns;

// Belongs to that thread; every thread that serves a ring of the worker has one. Between calls of the control plane
// slots and uploads are the same in all of them.
struct Shard {
  Shard(Worker& worker, std::unique_ptr<WorkerTurns> turns);
  ~Shard();

  Worker& worker;
  std::vector<Slot> slots;
  std::map<uint32_t, std::shared_ptr<Upload>> uploads;
  std::unique_ptr<WorkerTurns> turns;
  std::vector<std::unique_ptr<RingWork>> rings;
  bool closed = false;  // no ticket is taken and no run goes on any more
};

}  // namespace headgate
