#include "store/data_plane.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

#include "ring/futex.h"
#include "store/rewrite.h"
#include "store/shard.h"

namespace headgate {
namespace {

constexpr auto kNap = std::chrono::microseconds(200);
constexpr auto kShrinkNap = std::chrono::microseconds(50);  // lets copy threads have the frames' mutex
constexpr auto kDropDeadline = std::chrono::seconds(5);
constexpr auto kLetGoDeadline = std::chrono::seconds(1);
constexpr auto kControlDeadline = std::chrono::seconds(10);  // another call of the worker may wait for 5 s
constexpr uint32_t kWaitMs = 2000;                           // of a worker that does not say how long it waits
constexpr uint64_t kNsPerMs = 1'000'000;
// Bulk in flight, of all copy threads: about a millisecond of a slow device.
constexpr uint64_t kBulkBytes = 1 << 20;
constexpr uint64_t kBulkBytesMin = 256 << 10;
constexpr uint64_t kTraceSecondsMax = 24 * 3600;
constexpr uint32_t kSlotsMax = 1 << 16;
constexpr uint32_t kThreadsMax = 64;
constexpr uint32_t kDepthMax = 4096;

template <typename Condition>
bool eventually(std::chrono::nanoseconds deadline, Condition condition) {
  for (auto end = std::chrono::steady_clock::now() + deadline; !condition(); std::this_thread::sleep_for(kNap))
    if (std::chrono::steady_clock::now() >= end) return condition();
  return true;
}

}  // namespace

DataPlane::DataPlane(const DataPlaneOptions& o)
    : learn_bytes_(o.learn_bytes),
      frames_(o.dram_bytes, o.window.arena_bytes, o.extent_blocks, o.tier_policy, counters_) {
  if (o.copy_threads < 1 || o.copy_threads > kThreadsMax) throw invalid_argument("copy_threads must be 1..64");
  if (o.io_depth < 1 || o.io_depth > kDepthMax) throw invalid_argument("io_depth must be 1..4096");
  for (uint32_t i = 0; i < o.copy_threads; ++i)
    engines_.push_back(std::make_unique<CopyEngine>(
        EngineOptions{i, o.io_depth, o.spin_us, std::max(kBulkBytes / o.copy_threads, kBulkBytesMin),
                      o.disk_cost.through_blocks()},
        frames_, counters_, trace_, [this] { nudge(); }));
  load_.resize(o.copy_threads);
  WindowSettings window = o.window;
  window.threads = o.copy_threads;
  windows_ = std::make_shared<Windows>(window);
}

DataPlane::~DataPlane() { close(); }

void DataPlane::close() {
  std::lock_guard closing(close_mutex_);
  for (auto& engine : engines_) engine->stop();
  std::map<uint32_t, std::shared_ptr<PackFile>> packs;
  std::map<uint32_t, UploadEntry> uploads;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    workers_.clear();
    windows_.reset();
    uploads.swap(uploads_);
    packs.swap(packs_);
    rings_ = bound_slots_ = 0;
  }
  for (auto& [id, pack] : packs) drop_frames(std::move(pack));
  for (auto& [id, entry] : uploads) drop_seeds(*entry.upload);
}

std::shared_ptr<PackFile> DataPlane::find_pack(uint32_t pack) {
  std::lock_guard lock(mutex_);
  auto found = packs_.find(pack);
  if (found == packs_.end()) throw not_found("pack " + std::to_string(pack) + " is not open");
  return found->second;
}

std::shared_ptr<Worker> DataPlane::find_worker(uint32_t worker) {
  std::lock_guard lock(mutex_);
  auto found = workers_.find(worker);
  if (found == workers_.end()) throw not_found("worker " + std::to_string(worker) + " is not registered");
  return found->second;
}

DataPlane::UploadEntry DataPlane::find_upload(uint32_t upload) {
  std::lock_guard lock(mutex_);
  auto found = uploads_.find(upload);
  if (found == uploads_.end()) throw not_found("upload " + std::to_string(upload) + " does not exist");
  return found->second;
}

// --- packs ---

uint32_t DataPlane::create_upload(const std::string& path, const PackHeader& header) {
  auto upload = std::make_shared<Upload>(path, header, counters_);
  std::lock_guard lock(mutex_);
  uint32_t id = next_id_++;
  uploads_[id] = {std::move(upload), nullptr};
  return id;
}

uint32_t DataPlane::upload_missing(uint32_t upload) { return find_upload(upload).upload->missing(); }

uint32_t DataPlane::finish_upload(uint32_t upload) {
  UploadEntry entry = find_upload(upload);
  entry.upload->finish();
  drop_upload(entry, upload);
  {
    std::lock_guard lock(mutex_);
    if (uploads_.erase(upload) == 0) return 0;  // its worker has just been removed, and its frames with it
  }
  const std::shared_ptr<PackFile>& pack = entry.upload->seeds;
  if (!pack || pack->closed || !frames_.has_any(*pack)) {
    drop_seeds(*entry.upload);
    return 0;
  }
  try {
    pack->load(entry.upload->path());
    pack->seeded = true;
    return add_pack(pack);
  } catch (...) {
    drop_seeds(*entry.upload);
    throw;
  }
}

void DataPlane::abort_upload(uint32_t upload) {
  UploadEntry entry = find_upload(upload);
  drop_upload(entry, upload);
  drop_seeds(*entry.upload);
  entry.upload->abort();
  std::lock_guard lock(mutex_);
  uploads_.erase(upload);
}

void DataPlane::drop_upload(const UploadEntry& entry, uint32_t upload) {
  if (!entry.owner) return;
  Worker& owner = *entry.owner;
  auto controlled = control(owner);
  call(owner, [&](RingService& service) { return service.drop_upload(owner, upload); });
  owner.uploads.erase(upload);
}

// Of an upload that no copy thread knows any more.
void DataPlane::drop_seeds(const Upload& upload) {
  if (upload.seeds && frames_.has_any(*upload.seeds)) drop_frames(upload.seeds);
}

uint32_t DataPlane::open_pack(const std::string& path, uint32_t owner) {
  auto pack = std::make_shared<PackFile>(path, frames_.account(owner), counters_);
  if (pack->header().extent_blocks != frames_.extent_blocks())
    throw failed_precondition(
        path + " has extents of " + std::to_string(pack->header().extent_blocks) +
        " blocks; this data plane was started with extent_blocks = " + std::to_string(frames_.extent_blocks()));
  return add_pack(std::move(pack));
}

uint32_t DataPlane::add_pack(std::shared_ptr<PackFile> pack) {
  if (learn_bytes_ > 0) {
    const PackHeader& h = pack->header();
    pack->samples = RunSamples::within(learn_bytes_, learning_bytes_, h.layers * h.kinds[0].lanes, h.tokens);
  }
  std::lock_guard lock(mutex_);
  if (closed_) throw unavailable("the data plane is closed");
  const uint32_t id = next_id_++;
  packs_[id] = std::move(pack);
  return id;
}

void DataPlane::close_pack(uint32_t pack) {
  std::shared_ptr<PackFile> file;
  {
    std::lock_guard lock(mutex_);
    auto found = packs_.find(pack);
    if (found == packs_.end()) throw not_found("pack " + std::to_string(pack) + " is not open");
    if (found->second->bound > 0) throw failed_precondition("pack " + std::to_string(pack) + " is bound to a slot");
    file = std::move(found->second);
    packs_.erase(found);
  }
  try {
    for (auto& engine : engines_) {
      uint64_t next_owner = 0;
      engine->call([&](RingService& service) { return service.forget_pack(file.get(), next_owner); });
    }
    const bool at_rest = eventually(kDropDeadline, [&] { return !drop(*file).reading; });
    if (at_rest && file.use_count() == 1) file->close_file();  // its space is free, whoever has frames pinned
  } catch (...) {
    drop_frames(std::move(file));
    throw;
  }
  drop_frames(std::move(file));
}

// Gives up what frames of the pack are not pinned, in small parts.
Frames::Left DataPlane::drop(PackFile& pack) {
  Frames::Left all{true, false};
  for (size_t next = 0; all.any && next < pack.frame_of_extent.size(); std::this_thread::sleep_for(kShrinkNap)) {
    const Frames::Left left = frames_.drop(pack, next);
    all = {left.any, all.reading || left.reading};
  }
  return all;
}

// A pack lives as long as somebody has one of its frames pinned; it ends without the mutex, which may take long.
void DataPlane::drop_frames(std::shared_ptr<PackFile> pack) {
  drop(*pack);
  std::vector<std::shared_ptr<PackFile>> gone;
  std::lock_guard lock(mutex_);
  closing_packs_.push_back(std::move(pack));
  const auto end = closing_packs_.end();
  const auto left =
      std::partition(closing_packs_.begin(), end, [this](const auto& closing) { return frames_.has_any(*closing); });
  gone.assign(std::make_move_iterator(left), std::make_move_iterator(end));
  closing_packs_.erase(left, end);
}

PackHeader DataPlane::pack_header(uint32_t pack) { return find_pack(pack)->header(); }
void DataPlane::copy_map(uint32_t pack, int to) { find_pack(pack)->copy_map(to); }
std::vector<uint32_t> DataPlane::verify_pack(uint32_t pack) { return find_pack(pack)->verify(); }

bool DataPlane::pack_damaged(uint32_t pack) { return find_pack(pack)->damaged; }

std::vector<uint64_t> DataPlane::run_samples(uint32_t pack) {
  auto file = find_pack(pack);
  if (!file->samples) return {};
  const PackHeader& h = file->header();
  std::vector<uint64_t> samples(uint64_t{h.layers} * h.kinds[0].lanes * h.tokens);
  file->samples->copy(samples);
  return samples;
}

void DataPlane::rewrite_segment(uint32_t pack, uint32_t upload, uint32_t kind, uint32_t layer, uint32_t lane,
                                std::span<const uint16_t> order) {
  UploadEntry entry = find_upload(upload);
  if (entry.owner) throw invalid_argument("upload " + std::to_string(upload) + " is a worker's");
  headgate::rewrite_segment(*find_pack(pack), *entry.upload, kind, layer, lane, order);
}

void DataPlane::warm(uint32_t pack, const uint32_t* hot_records, uint32_t owner) {
  AheadJob job{find_pack(pack), {}, 0};
  if (job.pack->seeded.exchange(false)) return;
  const PackHeader& h = job.pack->header();
  const KindHeader& kind = h.kinds[0];
  uint32_t per_block = records_per_block(kind.record_bytes);
  uint32_t segments = h.layers * kind.lanes;
  // Rank by rank over all segments, so that a tier too small for all still holds the best of each.
  uint32_t ranks = uint32_t(kind.segment_bytes / kBlockBytes + h.extent_blocks) / h.extent_blocks + 1;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (uint32_t s = 0; s < segments; ++s) {
      uint32_t hot = std::min(hot_records[s], h.tokens);
      if (hot == 0) continue;
      uint32_t first = job.pack->segment_block(0, s / kind.lanes, s % kind.lanes);
      uint32_t extent = first / h.extent_blocks + rank;
      if (extent <= (first + (hot - 1) / per_block) / h.extent_blocks)
        job.extents.push_back({extent, job.pack->extent_mask(extent)});
    }
  }
  engines_[pack % engines_.size()]->call([&](RingService& service) {
    service.read_ahead(owner, std::move(job));
    return true;
  });
}

// --- bounds ---

void DataPlane::set_dram_quota(uint32_t owner, uint64_t bytes) {
  if (bytes > 0 && bytes < dram_quota_min())
    throw invalid_argument("a DRAM quota of " + std::to_string(bytes) + " B is too small; set at least " +
                           std::to_string(dram_quota_min()) + " B, or none");
  uint64_t frames = std::min<uint64_t>(bytes / frames_.frame_bytes(), frames_.count());
  FrameAccount& account = frames_.account(owner);
  frames_.set_limit(account, bytes > 0 ? uint32_t(frames) : FrameAccount::kNoLimit);
  while (!frames_.shrink(account)) std::this_thread::sleep_for(kShrinkNap);
  for (auto& engine : engines_) engine->nudge();
}

// --- workers ---

// Counts a ring for the copy thread that has the fewest, the first one from `first` on.
uint32_t DataPlane::least_loaded(uint32_t first) {
  std::lock_guard lock(mutex_);
  uint32_t best = first % load_.size();
  for (size_t i = 0; i < load_.size(); ++i)
    if (uint32_t next = uint32_t((first + i) % load_.size()); load_[next] < load_[best]) best = next;
  ++load_[best];
  return best;
}

std::unique_lock<Control> DataPlane::control(Worker& worker) {
  std::unique_lock lock(worker.control, kControlDeadline);
  if (!lock) throw unavailable("earlier calls for worker " + std::to_string(worker.id) + " wait for a copy thread");
  return lock;
}

// Carries out a command on every copy thread that serves the worker.
void DataPlane::call(Worker& worker, const CopyEngine::Command& command) {
  std::vector<CopyEngine*> engines;
  for (size_t i = 0; i < engines_.size(); ++i)
    if (worker.shards[i]) engines.push_back(engines_[i].get());
  size_t touched = 0;
  try {
    CopyEngine::call(engines, command, touched);
  } catch (...) {
    if (touched > 0) {  // its threads disagree about slots or uploads, or one of them has stopped half way
      worker.closed = true;
      nudge();
    }
    throw;
  }
}

uint32_t DataPlane::add_worker(int window_fd, uint64_t window_bytes, int staging_fd, uint64_t staging_bytes,
                               uint32_t slots, uint32_t owner, uint32_t wait_ms, const std::string& window) {
  if (slots < 1 || slots > kSlotsMax) throw invalid_argument("slots must be 1..65536");
  uint64_t run_ns_max = uint64_t{wait_ms == 0 ? kWaitMs : wait_ms} * kNsPerMs * 3 / 4;
  uint32_t id, home;
  std::shared_ptr<const Windows> windows;
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw unavailable("the data plane is closed");
    windows = windows_;
    id = next_id_++;
    home = workers_made_++;
  }
  auto worker = std::make_shared<Worker>(id, owner, home, uint32_t(engines_.size()), run_ns_max,
                                         windows->make(window, window_fd, window_bytes), window_bytes, staging_fd,
                                         staging_bytes, slots);
  if (worker->pull) worker->arena = arenas_.join(owner);
  std::lock_guard lock(mutex_);
  if (closed_) throw unavailable("the data plane is closed");
  workers_[id] = std::move(worker);
  return id;
}

int DataPlane::arena_descriptor(uint32_t worker) {
  auto w = find_worker(worker);
  auto controlled = control(*w);
  return w->arena ? w->arena->descriptor() : -1;
}

uint32_t DataPlane::add_ring(uint32_t worker, int requests_fd, int completions_fd, RingGeometry geometry, bool device) {
  auto w = find_worker(worker);
  auto controlled = control(*w);
  w->check_open();
  const uint32_t index = uint32_t(w->rings.size() + w->unserved.size());
  const uint64_t id = uint64_t{worker} << 16 | index;
  w->unserved.push_back(std::make_unique<RingConsumer>(requests_fd, completions_fd, geometry, device, id));
  return index;
}

void DataPlane::serve_rings(uint32_t worker) {
  auto w = find_worker(worker);
  auto controlled = control(*w);
  w->check_open();
  for (auto& ring : w->unserved) {
    ring->heartbeat(now_ns());
    place(w, std::move(ring));
  }
  w->unserved.clear();
}

void DataPlane::place(const std::shared_ptr<Worker>& worker, std::unique_ptr<RingConsumer> ring) {
  const uint32_t index = uint32_t(worker->rings.size());
  // Otherwise the first rings of all workers, which decode, would come together.
  const uint32_t engine = least_loaded(worker->home + index);
  try {
    worker->rings.reserve(index + 1);
    engines_[engine]->call([&](RingService& service) {
      service.add_ring(worker, std::move(ring));
      return true;
    });
  } catch (...) {
    std::lock_guard lock(mutex_);
    --load_[engine];
    throw;
  }
  worker->rings.push_back(engine);
  std::lock_guard lock(mutex_);
  ++rings_;
}

void DataPlane::remove_worker(uint32_t worker) {
  std::shared_ptr<Worker> w = find_worker(worker);
  std::vector<UploadEntry> uploads;
  {
    auto controlled = control(*w);
    w->closed = true;
    call(*w, [&](RingService& service) { return service.remove_worker(*w); });
    uint32_t slots = 0;
    for (Slot& slot : w->slots) slots += slot.binding != nullptr, slot.binding.reset();
    w->uploads.clear();
    for (auto& shard : w->shards)
      if (shard) shard->let_go();
    std::lock_guard lock(mutex_);
    bound_slots_ -= slots;
    if (workers_.erase(worker) == 0) return;  // another call has removed it meanwhile
    std::erase_if(uploads_, [&](const auto& entry) {
      bool owned = entry.second.owner == w;
      if (owned) uploads.push_back(entry.second);
      return owned;
    });
    rings_ -= uint32_t(w->rings.size());
    for (uint32_t engine : w->rings) --load_[engine];
  }
  for (UploadEntry& entry : uploads) {
    drop_seeds(*entry.upload);
    entry.upload->abort();
  }
  uploads.clear();
  w->arena.reset();
  // Its memory is unmapped here, not by a copy thread, which it would hold up; a hanging disk leaves it no choice.
  eventually(kLetGoDeadline, [&] { return w.use_count() == 1; });
}

void DataPlane::own_upload(uint32_t worker, uint32_t upload) {
  auto w = find_worker(worker);
  auto controlled = control(*w);
  w->check_open();
  std::shared_ptr<Upload> file;
  {
    std::lock_guard lock(mutex_);
    auto found = uploads_.find(upload);
    if (found == uploads_.end()) throw not_found("upload " + std::to_string(upload) + " does not exist");
    if (found->second.owner && found->second.owner != w)
      throw failed_precondition("upload " + std::to_string(upload) + " belongs to another worker");
    found->second.owner = w;
    file = found->second.upload;
    if (!file->seeds && file->header().extent_blocks == frames_.extent_blocks())
      file->seeds = std::make_shared<PackFile>(file->header(), frames_.account(w->owner), counters_);
  }
  w->uploads[upload] = file;
  call(*w, [&](RingService& service) {
    service.add_upload(*w, upload, file);
    return true;
  });
}

// Counts the pack as bound before anyone could close it.
BoundPack DataPlane::bound_pack(uint32_t pack) {
  std::lock_guard lock(mutex_);
  auto found = packs_.find(pack);
  if (found == packs_.end()) throw not_found("pack " + std::to_string(pack) + " is not open");
  return BoundPack(found->second);
}

uint32_t DataPlane::bind(uint32_t worker, uint32_t slot, const std::vector<uint32_t>& packs, uint32_t layers,
                         uint32_t lanes, std::vector<LaneWindow> windows, uint32_t record_bytes) {
  auto w = find_worker(worker);
  if (slot >= w->slots.size())
    throw invalid_argument("slot " + std::to_string(slot) + " of " + std::to_string(w->slots.size()));
  std::vector<BoundPack> bound;
  for (uint32_t pack : packs) bound.push_back(bound_pack(pack));
  auto binding =
      std::make_shared<const Binding>(bound, layers, lanes, std::move(windows), record_bytes, w->window_bytes);
  auto waits = std::make_shared<Waits>(uint32_t(engines_.size()), layers, lanes);
  auto controlled = control(*w);
  w->check_open();
  if (w->slots[slot].binding) throw failed_precondition("slot " + std::to_string(slot) + " is bound");
  const uint32_t epoch = w->slots[slot].epoch + 1;
  set_slot(*w, slot, {epoch, std::move(binding), std::move(waits)});
  std::lock_guard lock(mutex_);
  ++bound_slots_;
  return epoch;
}

uint32_t DataPlane::extend(uint32_t worker, uint32_t slot, uint32_t pack) {
  auto w = find_worker(worker);
  BoundPack bound = bound_pack(pack);
  auto controlled = control(*w);
  w->check_open();
  w->check_bound(slot);
  auto binding = std::make_shared<Binding>(*w->slots[slot].binding);
  binding->append(bound);
  set_slot(*w, slot, {w->slots[slot].epoch, binding, w->slots[slot].waits});
  return binding->records();
}

void DataPlane::unbind(uint32_t worker, uint32_t slot) {
  auto w = find_worker(worker);
  auto controlled = control(*w);
  w->check_bound(slot);
  set_slot(*w, slot, {w->slots[slot].epoch, nullptr, nullptr});
  std::lock_guard lock(mutex_);
  --bound_slots_;
}

// When it returns no thread goes by the former binding, which ends here, not in a copy thread.
void DataPlane::set_slot(Worker& worker, uint32_t slot, const Slot& now) {
  call(worker, [&](RingService& service) { return service.set_slot(worker, slot, now); });
  worker.slots[slot] = now;
}

// --- figures ---

std::shared_ptr<const Windows> DataPlane::windows() {
  std::lock_guard lock(mutex_);
  return windows_;
}

std::vector<std::pair<std::string, uint64_t>> DataPlane::stats() {
  std::lock_guard lock(mutex_);
  const Counters& c = counters_;
  return {{"tickets", c.tickets},
          {"runs", c.runs},
          {"runs_ok", c.runs_ok},
          {"runs_error", c.runs_error},
          {"runs_stale", c.runs_stale},
          {"records_copied", c.records_copied},
          {"records_pulled", c.records_pulled},
          {"pulls_late", c.pulls_late},
          {"bytes_copied", c.bytes_copied},
          {"extent_hits", c.extent_hits},
          {"extent_misses", c.extent_misses},
          {"evictions", c.evictions},
          {"nvme_read_bytes", c.nvme_read_bytes},
          {"nvme_read_ops", c.nvme_read_ops},
          {"nvme_through_bytes", c.nvme_through_bytes},
          {"nvme_write_bytes", c.nvme_write_bytes},
          {"crc_errors", c.crc_errors},
          {"wakes", c.wakes},
          {"sleeps", c.sleeps},
          {"polls", c.polls},
          {"store_bytes", c.store_bytes},
          {"warm_bytes", c.warm_bytes},
          {"seed_bytes", c.seed_bytes},
          {"promotes_dropped", c.promotes_dropped},
          {"hints_dropped", c.hints_dropped},
          {"runs_late", c.runs_late},
          {"runs_starved", c.runs_starved},
          {"portions", c.portions},
          {"worker_faults", c.worker_faults},
          {"calls_late", c.calls_late},
          {"frames", frames_.count()},
          {"frames_used", frames_.used()},
          {"frames_pinned", frames_.pinned()},
          {"arenas", arenas_.count()},
          {"arena_bytes", uint64_t{frames_.arena_frames()} * frames_.frame_bytes()},
          {"frame_bytes", frames_.frame_bytes()},
          {"learning_bytes", learning_bytes_},
          {"packs_open", packs_.size()},
          {"uploads_open", uploads_.size()},
          {"workers", workers_.size()},
          {"rings", rings_},
          {"bound_slots", bound_slots_}};
}

std::vector<std::pair<std::string, uint64_t>> DataPlane::census() {
  uint64_t in_flight = 0;
  for (auto& engine : engines_)
    engine->call([&](RingService& service) {
      in_flight += service.runs_in_flight();
      return true;
    });
  const Counters& c = counters_;
  Frames::Census f = frames_.census();
  return {{"runs", c.runs},
          {"runs_ended", c.runs_ok + c.runs_error + c.runs_stale},
          {"runs_in_flight", in_flight},
          {"blocks_landed", f.blocks_landed},
          {"blocks_evicted", f.blocks_evicted},
          {"blocks_valid", f.blocks_valid},
          {"frames_held", f.frames_held},
          {"frames_used", f.frames_used},
          {"frames_of_owners", f.frames_of_owners},
          {"owners_miscounted", f.owners_miscounted}};
}

std::vector<std::pair<std::string, const Histogram*>> DataPlane::histograms() const {
  const Histograms& h = counters_.times;
  return {{"ticket_gather", &h.ticket_gather}, {"ticket_range", &h.ticket_range}, {"ticket_store", &h.ticket_store},
          {"read_decode", &h.read_decode},     {"read_bulk", &h.read_bulk},       {"read_ahead", &h.read_ahead}};
}

SlotWaits DataPlane::waits(uint32_t worker, uint32_t slot, size_t lanes) {
  auto w = find_worker(worker);
  std::shared_ptr<Waits> waits;
  {
    auto controlled = control(*w);
    w->check_bound(slot);
    waits = w->slots[slot].waits;
  }
  return {{{"gather", waits->totals(Waits::kGather)},
           {"range", waits->totals(Waits::kRange)},
           {"store", w->stores.totals(Waits::kStore)}},
          waits->worst(lanes)};
}

void DataPlane::trace_accesses(uint64_t seconds) {
  frames_.accesses().start(now_ns() + std::min(seconds, kTraceSecondsMax) * 1000 * kNsPerMs);
}

void DataPlane::nudge() {
  for (auto& engine : engines_) engine->nudge();
}

}  // namespace headgate
