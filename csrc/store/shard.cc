#include "store/shard.h"

#include "store/ring_work.h"

namespace headgate {

Shard::Shard(Worker& worker, std::unique_ptr<WorkerTurns> turns)
    : worker(worker), slots(worker.slots), uploads(worker.uploads), turns(std::move(turns)) {}

Shard::~Shard() = default;

void Shard::let_go() {
  slots.clear();
  uploads.clear();
}

}  // namespace headgate
