// A ring in service: its end of the shared memory, and the runs that are under way.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "store/pulled.h"
#include "store/run_task.h"
#include "store/schedule.h"

namespace headgate {

// Runs that have something to read or write, of one worker and class.
struct TransferLeaf : FairNode {
  using FairNode::FairNode;
  TaskList tasks;
};

enum class Transfer : uint8_t { kDecode, kRestore, kStore, kCount };
inline Transfer transfer_of(Op op) {
  return op == Op::kGather ? Transfer::kDecode : op == Op::kStore ? Transfer::kStore : Transfer::kRestore;
}

// A uid on one copy thread: its turns, and what its runs hold while they wait.
struct Owner {
  Owner(uint32_t number, FrameAccount& frames, FairNode& turns, FairNode (&transfers)[size_t(Transfer::kCount)])
      : number(number),
        frames(frames),
        turn(&turns),
        transfers{FairNode(&transfers[0]), FairNode(&transfers[1]), FairNode(&transfers[2])} {}
  ~Owner() {
    turn.part();
    for (FairNode& node : transfers) node.part();
  }

  const uint32_t number;
  FrameAccount& frames;
  uint32_t workers = 0;
  FairNode turn;
  FairNode transfers[size_t(Transfer::kCount)];
  uint64_t plan_bytes = 0;
  uint32_t portions[2] = {};  // that hold frames; of decode, of bulk
};

// A worker's share of its owner's, on one copy thread.
struct WorkerTurns {
  explicit WorkerTurns(Owner& owner)
      : owner(owner),
        turn(&owner.turn),
        transfers{TransferLeaf(&owner.transfers[0]), TransferLeaf(&owner.transfers[1]),
                  TransferLeaf(&owner.transfers[2])} {}

  // No run of the worker is under way any more.
  void part() {
    turn.part();
    for (TransferLeaf& leaf : transfers) leaf.part();
  }

  Owner& owner;
  FairNode turn;
  TransferLeaf transfers[size_t(Transfer::kCount)];
};

struct RingWork : FairNode {
  // Runs that may be under way at once: none waits for the disk behind more than these, none is begun beyond them.
  static constexpr uint32_t kWindow = 128;

  RingWork(Shard& shard, std::unique_ptr<RingConsumer> ring, size_t number)
      : FairNode(&shard.turns->turn),
        shard(shard),
        consumer(std::move(ring)),
        number(number),
        pulled(shard.turns->owner.frames) {
    tasks.reserve(kWindow), spare.reserve(kWindow);
  }

  // Poisoned, or another ring of its worker is.
  bool dead() const { return shard.worker.closed.load(std::memory_order_acquire) || consumer->dead(); }

  // Whether a device posts here just now: it is marked, and has been marked anew or answered within its worker's wait.
  bool stepping(uint64_t now) {
    const uint64_t seen = consumer->stepping();
    if (seen != mark) mark = seen, marked_ns = now;
    return mark != 0 && now < std::max(marked_ns, last_progress_ns) + shard.worker.run_ns_max;
  }

  RunTask& new_task() {
    if (spare.empty()) spare.push_back(std::make_unique<RunTask>());
    tasks.push_back(std::move(spare.back()));
    spare.pop_back();
    RunTask& t = *tasks.back();
    t.at = uint32_t(tasks.size() - 1);
    ++live;
    return t;
  }
  // The run is over and nothing of it is in flight or pinned.
  void free_task(RunTask& t) {
    uint32_t at = t.at;
    std::swap(tasks[at], tasks.back());
    tasks[at]->at = at;
    if (spare.size() < kWindow) spare.push_back(std::move(tasks.back()));
    tasks.pop_back();
  }

  Shard& shard;
  std::unique_ptr<RingConsumer> consumer;
  const size_t number;  // among the worker's
  std::vector<std::unique_ptr<RunTask>> tasks, spare;
  uint32_t live = 0;  // tasks that have not ended
  TaskList ready, starved, watching;
  Pulled pulled;
  bool look_for_frames = false;       // frames may have become free since `starved` last found none
  TakenTicket* cancelling = nullptr;  // a CANCEL ticket that is being carried out
  Run promoting{};                    // the PROMOTE run that is being looked through
  uint32_t promoted = 0;              // pairs of it
  uint64_t last_progress_ns = 0;
  uint64_t mark = 0, marked_ns = 0;  // what its device said last, and since when
};

}  // namespace headgate
