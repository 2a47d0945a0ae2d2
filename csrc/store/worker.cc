#include "store/worker.h"

#include <cstring>

#include "store/ring_consumer.h"
#include "store/shard.h"

namespace headgate {

Binding::Binding(const std::vector<BoundPack>& packs, uint32_t layers, uint32_t lanes, std::vector<LaneWindow> windows,
                 uint32_t record_bytes, uint64_t window_bytes)
    : layers_(layers), lanes_(lanes), record_bytes_(record_bytes), windows_(std::move(windows)) {
  if (record_bytes < kRecordAlign || record_bytes > kRecordBytesMax || record_bytes % kRecordAlign != 0)
    throw invalid_argument("record_bytes must be a multiple of 64, at most 4096");
  for (const LaneWindow& w : windows_)
    if (w.offset > window_bytes || w.places > (window_bytes - w.offset) / record_bytes)
      throw invalid_argument("lane window at " + std::to_string(w.offset) + " with " + std::to_string(w.places) +
                             " places leaves the window of " + std::to_string(window_bytes) + " bytes");
  for (const BoundPack& pack : packs) append(pack);
}

void Binding::check_pack(const PackHeader& h) const {
  if (h.layers != layers_ || h.kinds[0].lanes != lanes_ || h.kinds[0].record_bytes != record_bytes_)
    throw failed_precondition("a pack of " + std::to_string(h.layers) + " layers, " + std::to_string(h.kinds[0].lanes) +
                              " lanes, " + std::to_string(h.kinds[0].record_bytes) +
                              " B records does not fit a slot of " + std::to_string(layers_) + ", " +
                              std::to_string(lanes_) + ", " + std::to_string(record_bytes_));
  if (packs_.empty()) return;
  const PackHeader& other = pack(0).header();
  if (h.kind_count != other.kind_count || std::memcmp(h.fingerprint, other.fingerprint, sizeof h.fingerprint) != 0)
    throw failed_precondition("the packs of a slot must share kinds and fingerprint");
}

void Binding::append(const BoundPack& pack) {
  const PackHeader& h = pack.file()->header();
  check_pack(h);
  if (uint64_t{records_} + h.tokens > UINT32_MAX) throw invalid_argument("a session has at most 2^32-1 records");
  pack_of_.insert(pack_of_.end(), h.tokens / kHashBlockTokens, uint32_t(packs_.size()));
  first_record_.push_back(records_);
  records_ += h.tokens;
  packs_.push_back(pack);
}

Worker::Worker(uint32_t id, uint32_t owner, uint32_t home, uint32_t threads, uint64_t run_ns_max,
               std::unique_ptr<Window> window, uint64_t window_bytes, int staging_fd, uint64_t staging_bytes,
               uint32_t slots)
    : id(id),
      owner(owner),
      home(home),
      run_ns_max(run_ns_max),
      window(std::move(window)),
      pull(dynamic_cast<PullWindow*>(this->window.get())),
      window_bytes(window_bytes),
      staging(staging_fd, staging_bytes, PROT_READ, "staging"),
      stores(threads, 0, 0),
      slots(slots),
      shards(threads) {}

Worker::~Worker() = default;

void Worker::check_open() const {
  if (closed) throw failed_precondition("worker " + std::to_string(id) + " is poisoned; register it anew");
}

void Worker::check_bound(uint32_t slot) const {
  if (slot >= slots.size() || !slots[slot].binding)
    throw failed_precondition("slot " + std::to_string(slot) + " is not bound");
}

}  // namespace headgate
