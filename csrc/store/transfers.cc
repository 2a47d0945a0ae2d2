#include "store/transfers.h"

#include <algorithm>

namespace headgate {
namespace {

constexpr uint32_t kReadsAtOnce = 8;

TransferLeaf& leaf_of(RunTask& t) { return t.shard->turns->transfers[size_t(transfer_of(t.op))]; }

}  // namespace

void Transfers::add(RunTask& t) {
  TransferLeaf& leaf = leaf_of(t);
  leaf.tasks.push_back(t);
  leaf.wake();
}

void Transfers::remove(RunTask& t) {
  TransferLeaf& leaf = leaf_of(t);
  if (t.list != &leaf.tasks) return;
  TaskList::remove(t);
  if (leaf.tasks.empty()) leaf.rest();
}

bool Transfers::waiting() const {
  return std::any_of(std::begin(roots_), std::end(roots_), [](const FairNode& root) { return root.busy(); });
}

bool Transfers::bulk_has_room() const {
  return bulk_bytes_ < bulk_bytes_max_ && bulk_requests_ < std::max(1u, io_.depth() - io_.depth() / 4);
}

// Decode first, but while both wait bulk gets one turn in eight; restores and stores share the turns of bulk by bytes.
RunTask* Transfers::next() {
  bool restore = ready(Transfer::kRestore), store = ready(Transfer::kStore);
  bool bulk = (restore || store) && bulk_has_room();
  if (ready(Transfer::kDecode) && !(bulk && decode_in_a_row_ >= kDecodeBeforeBulk)) return front(Transfer::kDecode);
  if (!bulk) return nullptr;
  uint64_t& restored = served_[size_t(Transfer::kRestore)];
  uint64_t& stored = served_[size_t(Transfer::kStore)];
  if (restore != store) restored = stored = std::max(restored, stored);  // being alone saves nothing up
  return front(restore && (!store || restored <= stored) ? Transfer::kRestore : Transfer::kStore);
}

RunTask* Transfers::front(Transfer kind) {
  return static_cast<TransferLeaf*>(roots_[size_t(kind)].next())->tasks.front();
}

void Transfers::transfer(RunTask& t) {
  uint32_t before = t.io_in_flight;
  uint64_t bytes = t.op == Op::kStore ? store_.write(t) : gather_.read(t, std::min(io_.room(), kReadsAtOnce));
  uint32_t requests = t.io_in_flight - before;
  leaf_of(t).charge(bytes);
  served_[size_t(transfer_of(t.op))] += bytes;
  queued_ += std::max(1u, requests);
  if (!t.bulk()) {
    decode_in_a_row_ += requests;
    return;
  }
  decode_in_a_row_ = 0;
  if (requests == 0) return;
  bulk_bytes_ += bytes;
  bulk_requests_ += requests;
}

void Transfers::landed(const Io& io) {
  if (!io.run || !io.bulk) return;
  bulk_bytes_ -= io.bytes;
  --bulk_requests_;
}

}  // namespace headgate
