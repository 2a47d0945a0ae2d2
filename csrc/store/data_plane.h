// The daemon's data plane as the control plane sees it: packs, uploads, workers, slots, figures.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "store/copy_engine.h"
#include "store/disk_cost.h"

namespace headgate {

struct DataPlaneOptions {
  uint64_t dram_bytes;
  uint32_t io_depth;
  uint32_t copy_threads;
  uint32_t spin_us;
  uint32_t extent_blocks;
  WindowSettings window = {};                   // and the size of arenas, part of dram_bytes
  std::string tier_policy = policy_names()[0];  // which frames go
  DiskCost disk_cost = {};
  uint64_t learn_bytes = 0;  // for samples of runs, of all packs; 0: none are taken
};

struct SlotWaits {
  std::vector<std::pair<std::string, Waits::OpTotals>> ops;
  std::vector<Waits::Stalls> lanes;
};

// Thread-safe; every call may block on the disk or on a copy thread, never on a worker. The mutex guards the tables
// only, and is never held while waiting.
class DataPlane {
 public:
  explicit DataPlane(const DataPlaneOptions& options);
  ~DataPlane();
  void close();

  uint32_t create_upload(const std::string& path, const PackHeader& header);
  uint32_t upload_missing(uint32_t upload);
  // 0, or the pack, opened, of which DRAM holds blocks already; the file is durable on return, and after DATA_LOSS or
  // another error of opening it to be removed.
  uint32_t finish_upload(uint32_t upload);
  void abort_upload(uint32_t upload);

  // Its frames count as the owner's (a uid).
  uint32_t open_pack(const std::string& path, uint32_t owner);
  // Waits some seconds for reads in flight. They keep its frames, and so does a worker that was told to read them.
  void close_pack(uint32_t pack);
  PackHeader pack_header(uint32_t pack);
  // Writes the map, u16[layers, lanes of kind 0, tokens], to a descriptor; needs no memory that grows with it.
  void copy_map(uint32_t pack, int to);
  std::vector<uint32_t> verify_pack(uint32_t pack);
  bool pack_damaged(uint32_t pack);
  // Which of the sampled runs wanted each record, a bit each: u64[layers, lanes of kind 0, tokens]. Empty: none are
  // sampled of this pack.
  std::vector<uint64_t> run_samples(uint32_t pack);
  // As in rewrite.h, into an upload that no worker owns.
  void rewrite_segment(uint32_t pack, uint32_t upload, uint32_t kind, uint32_t layer, uint32_t lane,
                       std::span<const uint16_t> order);
  // A hint: hot_records is [layers, lanes of kind 0]; an owner who hints too much is not heard, and counted. The first
  // one of a pack that finish_upload has returned was followed before it came.
  void warm(uint32_t pack, const uint32_t* hot_records, uint32_t owner);

  // Rounds are fair among owners (uids) first.
  // Runs are given up after 3/4 of wait_ms (0: the default), the worker's wait.
  // window: its kind, as Windows::make takes it. Of kind `pull` the owner's packs are cached in its arena alone, as
  // long as it has such a worker; RESOURCE_EXHAUSTED: no arena is left.
  uint32_t add_worker(int window_fd, uint64_t window_bytes, int staging_fd, uint64_t staging_bytes, uint32_t slots,
                      uint32_t owner, uint32_t wait_ms, const std::string& window = "");
  // A new descriptor of a window that lies in a device's memory; -1 of another one.
  int window_descriptor(uint32_t worker) { return find_worker(worker)->window->descriptor(); }
  // A new descriptor of its owner's arena, for a worker that pulls; -1 for another one.
  int arena_descriptor(uint32_t worker);
  // Formats both headers; the ring is not looked at before serve_rings. device: one posts, which can wake nobody.
  uint32_t add_ring(uint32_t worker, int requests_fd, int completions_fd, RingGeometry geometry, bool device = false);
  // Copy threads serve the rings added so far. From here on one waits in the kernel for whoever may give pages of the
  // worker's memory back: nobody must be able to. After an error the worker can only be removed.
  void serve_rings(uint32_t worker);
  void remove_worker(uint32_t worker);
  // Arenas that could not be given back with their last worker: to be called again and again.
  void give_back_arenas() { arenas_.give_back(); }
  void own_upload(uint32_t worker, uint32_t upload);
  uint32_t bind(uint32_t worker, uint32_t slot, const std::vector<uint32_t>& packs, uint32_t layers, uint32_t lanes,
                std::vector<LaneWindow> windows, uint32_t record_bytes);
  uint32_t extend(uint32_t worker, uint32_t slot, uint32_t pack);
  void unbind(uint32_t worker, uint32_t slot);

  // The least bound on what an owner holds of the DRAM tier: enough for several runs at once.
  uint64_t dram_quota_min() const { return uint64_t{kQuotaFramesMin} * frames_.frame_bytes(); }
  // Bounds the frames of an owner's packs; 0: no bound. On return they are no more than that, but for frames that runs
  // use at this moment: they go with those. INVALID_ARGUMENT below dram_quota_min().
  void set_dram_quota(uint32_t owner, uint64_t bytes);
  // Frames by owner, of all that have some.
  std::map<uint32_t, uint32_t> owners() const { return frames_.used_by_owner(); }

  // Bytes that went to the workers of each owner since the start, of all that had some.
  std::map<uint32_t, uint64_t> moved() const { return frames_.moved_by_owner(); }

  // Null once closed.
  std::shared_ptr<const Windows> windows();
  std::vector<std::pair<std::string, uint64_t>> stats();
  // Both sides of what must add up: Frames::Census, and runs begun, ended and under way.
  std::vector<std::pair<std::string, uint64_t>> census();
  std::vector<std::pair<std::string, const Histogram*>> histograms() const;
  // Of a slot since it was bound, and of its worker's STORE runs; the `lanes` that stood still longest.
  // FAILED_PRECONDITION: it is not bound.
  SlotWaits waits(uint32_t worker, uint32_t slot, size_t lanes);
  std::vector<TraceRow> drain_trace() { return trace_.drain(); }
  // As AccessTrace has them.
  void trace_accesses(uint64_t seconds);
  auto drain_accesses() { return frames_.accesses().drain(); }
  void end_accesses() { frames_.accesses().stop(); }

 private:
  static constexpr uint32_t kQuotaFramesMin = 8;

  struct UploadEntry {
    std::shared_ptr<Upload> upload;
    std::shared_ptr<Worker> owner;
  };

  std::shared_ptr<PackFile> find_pack(uint32_t pack);
  std::shared_ptr<Worker> find_worker(uint32_t worker);
  UploadEntry find_upload(uint32_t upload);
  BoundPack bound_pack(uint32_t pack);
  Frames::Left drop(PackFile& pack);
  void drop_frames(std::shared_ptr<PackFile> pack);
  uint32_t least_loaded(uint32_t first);
  // These with the worker's control lock held.
  std::unique_lock<Control> control(Worker& worker);
  void place(const std::shared_ptr<Worker>& worker, std::unique_ptr<RingConsumer> ring);
  void call(Worker& worker, const CopyEngine::Command& command);
  void set_slot(Worker& worker, uint32_t slot, const Slot& now);
  void drop_upload(const UploadEntry& entry, uint32_t upload);
  void drop_seeds(const Upload& upload);
  uint32_t add_pack(std::shared_ptr<PackFile> pack);
  void nudge();

  Counters counters_;
  const uint64_t learn_bytes_;
  std::atomic<uint64_t> learning_bytes_{0};
  Trace trace_;
  Frames frames_;
  Arenas arenas_{frames_};
  std::vector<std::unique_ptr<CopyEngine>> engines_;

  std::mutex close_mutex_;
  std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<const Windows> windows_;  // with their device; null once closed
  uint32_t next_id_ = 1;                    // packs, uploads and workers never share or reuse a number
  std::map<uint32_t, std::shared_ptr<PackFile>> packs_;
  std::map<uint32_t, UploadEntry> uploads_;
  std::map<uint32_t, std::shared_ptr<Worker>> workers_;
  std::vector<std::shared_ptr<PackFile>> closing_packs_;  // closed, with frames that somebody still has pinned
  std::vector<uint32_t> load_;                            // by engine: rings
  uint32_t workers_made_ = 0, rings_ = 0, bound_slots_ = 0;
};

}  // namespace headgate
