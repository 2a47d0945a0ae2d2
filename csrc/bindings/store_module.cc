// kvstore_service._native: the data plane for Python. The API is documented in kvstore_service/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "core/pull.h"
#include "store/crc32c.h"
#include "store/data_plane.h"
#include "store/moves.h"
#include "store/schedule.h"
#include "store/tier/policy.h"
#include "store/tier/replay.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

#ifdef HEADGATE_IO_SHIM
void bind_shim(nb::module_& m);  // shim.cc
#endif

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

template <size_t N>
void set_bytes(uint8_t (&to)[N], const nb::bytes& from, const char* name) {
  if (from.size() != N)
    throw invalid_argument(std::string(name) + " must have " + std::to_string(N) + " bytes, not " +
                           std::to_string(from.size()));
  std::memcpy(to, from.c_str(), N);
}

template <size_t N>
nb::bytes get_bytes(const uint8_t (&from)[N]) {
  return nb::bytes(reinterpret_cast<const char*>(from), N);
}

PackHeader make_header(const nb::bytes& pack_id, const nb::bytes& build, const nb::bytes& parent,
                       const nb::bytes& fingerprint, uint32_t layers, const std::vector<KindHeader>& kinds,
                       uint32_t tokens, uint32_t extent_blocks, uint32_t record_order) {
  if (kinds.empty() || kinds.size() > kKindsMax) throw invalid_argument("kinds: there must be 1..4");
  PackHeader h{};
  set_bytes(h.pack_id, pack_id, "pack_id");
  set_bytes(h.build, build, "build");
  set_bytes(h.parent, parent, "parent");
  set_bytes(h.fingerprint, fingerprint, "fingerprint");
  h.layers = layers;
  h.kind_count = uint32_t(kinds.size());
  std::copy(kinds.begin(), kinds.end(), h.kinds);
  h.tokens = tokens;
  h.extent_blocks = extent_blocks;
  h.record_order = record_order;
  check_shape(h);
  lay_out(h);
  return h;
}

template <typename T>
nb::object to_array(std::vector<T>&& values, std::vector<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape.size(), shape.data(), owner));
}

using Blocks = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object block_crcs(const nb::bytes& build, uint64_t first_block, Blocks blocks) {
  uint8_t key[sizeof PackHeader::build];
  set_bytes(key, build, "build");
  if (blocks.shape(0) % kBlockBytes != 0) throw invalid_argument("blocks: whole blocks of 4096 bytes");
  std::vector<uint32_t> crcs(blocks.shape(0) / kBlockBytes);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < crcs.size(); ++i) crcs[i] = block_crc(key, first_block + i, blocks.data() + i * kBlockBytes);
  }
  size_t count = crcs.size();
  return to_array(std::move(crcs), {count});
}

using RecordOrder = nb::ndarray<const uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void rewrite_segment(DataPlane& plane, uint32_t pack, uint32_t upload, uint32_t kind, uint32_t layer, uint32_t lane,
                     RecordOrder order) {
  nb::gil_scoped_release release;
  plane.rewrite_segment(pack, upload, kind, layer, lane, {order.data(), order.shape(0)});
}

nb::object run_samples(DataPlane& plane, uint32_t pack) {
  std::vector<uint64_t> samples;
  PackHeader h;
  {
    nb::gil_scoped_release release;
    h = plane.pack_header(pack);
    samples = plane.run_samples(pack);
  }
  if (samples.empty()) return nb::none();
  return to_array(std::move(samples), {h.layers, h.kinds[0].lanes, h.tokens});
}

using HotRecords = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void warm(DataPlane& plane, uint32_t pack, HotRecords hot, uint32_t owner) {
  nb::gil_scoped_release release;
  PackHeader h = plane.pack_header(pack);
  if (hot.shape(0) != h.layers || hot.shape(1) != h.kinds[0].lanes)
    throw invalid_argument("hot_records must be uint32[layers, lanes] of the pack");
  plane.warm(pack, hot.data(), owner);
}

using LaneArray = nb::ndarray<const uint64_t, nb::shape<-1, -1, 2>, nb::c_contig, nb::device::cpu>;

uint32_t bind_slot(DataPlane& plane, uint32_t worker, uint32_t slot, const std::vector<uint32_t>& packs,
                   LaneArray windows, uint32_t record_bytes) {
  nb::gil_scoped_release release;
  std::vector<LaneWindow> lanes(windows.shape(0) * windows.shape(1));
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = {windows.data()[2 * i], windows.data()[2 * i + 1]};
  return plane.bind(worker, slot, packs, uint32_t(windows.shape(0)), uint32_t(windows.shape(1)), std::move(lanes),
                    record_bytes);
}

using Figures = std::vector<std::pair<std::string, uint64_t>>;

nb::dict figures_of(DataPlane& plane, Figures (DataPlane::*read)()) {
  Figures figures;
  {
    nb::gil_scoped_release release;
    figures = (plane.*read)();
  }
  nb::dict out;
  for (const auto& [name, value] : figures) out[name.c_str()] = value;
  return out;
}

std::shared_ptr<const Windows> windows_of(DataPlane& plane) {
  auto windows = plane.windows();
  if (!windows) throw unavailable("the data plane is closed");
  return windows;
}

nb::dict histograms(const DataPlane& plane) {
  nb::dict out;
  for (const auto& [name, histogram] : plane.histograms()) {
    nb::list bounds, counts;
    for (uint32_t b = 0; b < Histogram::kBounds; ++b) bounds.append(Histogram::bound_us(b));
    for (uint32_t b = 0; b <= Histogram::kBounds; ++b) counts.append(histogram->count(b));
    out[name.c_str()] = nb::make_tuple(bounds, counts, histogram->sum_us());
  }
  return out;
}

nb::object drain_trace(DataPlane& plane) {
  std::vector<uint64_t> flat;
  for (const TraceRow& row : plane.drain_trace()) flat.insert(flat.end(), row.begin(), row.end());
  size_t rows = flat.size() / std::tuple_size_v<TraceRow>;
  return to_array(std::move(flat), {rows, std::tuple_size_v<TraceRow>});
}

constexpr const char* kWaitNames[] = {"queue_ns", "pins_ns", "disk_ns", "copy_ns", "commit_ns"};
static_assert(std::size(kWaitNames) == size_t(Wait::kCount));

nb::tuple waits(DataPlane& plane, uint32_t worker, uint32_t slot, size_t lanes) {
  SlotWaits found;
  {
    nb::gil_scoped_release release;
    found = plane.waits(worker, slot, lanes);
  }
  nb::dict ops;
  for (const auto& [name, w] : found.ops) {
    nb::dict op;
    for (size_t i = 0; i < w.ns.size(); ++i) op[kWaitNames[i]] = w.ns[i];
    op["runs"] = w.runs, op["failed"] = w.failed, op["slowest_ns"] = w.slowest_ns;
    op["extent_hits"] = w.hits, op["extent_misses"] = w.misses;
    op["read_bytes"] = w.read_bytes, op["moved_bytes"] = w.moved_bytes;
    ops[name.c_str()] = op;
  }
  nb::list stalls;
  for (const Waits::Stalls& s : found.lanes)
    stalls.append(nb::make_tuple(s.layer, s.lane, s.stalls, s.ns, s.slowest_ns));
  return nb::make_tuple(ops, stalls);
}

void bind_errors(nb::module_& m) {
  static PyObject* native_error =
      PyErr_NewExceptionWithDoc("kvstore_service._native.NativeError",
                                "An error of the data plane; `code` names a gRPC status.", PyExc_RuntimeError, nullptr);
  m.attr("NativeError") = nb::handle(native_error);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      nb::object instance = nb::handle(native_error)(error.what());
      instance.attr("code") = error.code();
      PyErr_SetObject(native_error, instance.ptr());
    }
  });
}

void bind_shapes(nb::module_& m) {
  nb::class_<KindHeader>(m, "KindSpec")
      .def(
          "__init__",
          [](KindHeader* self, uint32_t lanes, uint32_t d, uint32_t dtype, uint32_t record_bytes) {
            new (self) KindHeader{lanes, d, dtype, record_bytes, 0, 0};
          },
          "lanes"_a, "d"_a, "dtype"_a, "record_bytes"_a)
      .def_ro("lanes", &KindHeader::lanes)
      .def_ro("d", &KindHeader::d)
      .def_ro("dtype", &KindHeader::dtype)
      .def_ro("record_bytes", &KindHeader::record_bytes);

  nb::class_<PackHeader>(m, "PackSpec")
      .def(
          "__init__",
          [](PackHeader* self, nb::bytes pack_id, nb::bytes build, nb::bytes parent, nb::bytes fingerprint,
             uint32_t layers, const std::vector<KindHeader>& kinds, uint32_t tokens, uint32_t extent_blocks,
             uint32_t record_order) {
            new (self) PackHeader(
                make_header(pack_id, build, parent, fingerprint, layers, kinds, tokens, extent_blocks, record_order));
          },
          "pack_id"_a, "build"_a, "parent"_a, "fingerprint"_a, "layers"_a, "kinds"_a, "tokens"_a, "extent_blocks"_a,
          "record_order"_a = 0)
      .def_prop_ro("pack_id", [](const PackHeader& h) { return get_bytes(h.pack_id); })
      .def_prop_ro("build", [](const PackHeader& h) { return get_bytes(h.build); })
      .def_prop_ro("parent", [](const PackHeader& h) { return get_bytes(h.parent); })
      .def_prop_ro("fingerprint", [](const PackHeader& h) { return get_bytes(h.fingerprint); })
      .def_ro("layers", &PackHeader::layers)
      .def_ro("tokens", &PackHeader::tokens)
      .def_ro("extent_blocks", &PackHeader::extent_blocks)
      .def_ro("record_order", &PackHeader::record_order)
      .def_ro("file_bytes", &PackHeader::file_bytes)
      .def_prop_ro("kinds",
                   [](const PackHeader& h) { return std::vector<KindHeader>(h.kinds, h.kinds + h.kind_count); })
      .def(
          "segment_bytes",
          [](const PackHeader& h, uint32_t kind) {
            if (kind >= h.kind_count) throw invalid_argument("kind " + std::to_string(kind) + " does not exist");
            return h.kinds[kind].segment_bytes;
          },
          "kind"_a);

  nb::class_<RingGeometry>(m, "RingGeometry")
      .def(
          "__init__",
          [](RingGeometry* self, uint32_t tickets, uint32_t runs_max, uint32_t pairs_max) {
            RingGeometry g{tickets, runs_max, pairs_max};
            if (!RingLayout{g}.valid())
              throw invalid_argument("tickets must be a power of two in 2..4096, runs_max 1..65535, pairs_max 1..2^24");
            new (self) RingGeometry(g);
          },
          "tickets"_a, "runs_max"_a, "pairs_max"_a)
      .def_ro("tickets", &RingGeometry::tickets)
      .def_ro("runs_max", &RingGeometry::runs_max)
      .def_ro("pairs_max", &RingGeometry::pairs_max)
      .def_prop_ro("requests_bytes", [](const RingGeometry& g) { return RingLayout{g}.requests_bytes(); })
      .def_prop_ro("completions_bytes", [](const RingGeometry& g) { return RingLayout{g}.completions_bytes(); });
}

// Leaves of a tree of fair rounds by themselves, two levels deep.
class FairRounds {
 public:
  uint32_t add(uint32_t owner) {
    auto& node = owners_[owner];
    if (!node) node = std::make_unique<FairNode>(&root_);
    leaves_.push_back(std::make_unique<FairNode>(node.get()));
    return uint32_t(leaves_.size() - 1);
  }
  FairNode& leaf(uint32_t index) { return *leaves_.at(index); }
  uint32_t next() {
    FairNode* next = root_.next();
    for (uint32_t i = 0; i < leaves_.size(); ++i)
      if (leaves_[i].get() == next) return i;
    return UINT32_MAX;
  }

 private:
  FairNode root_;
  std::map<uint32_t, std::unique_ptr<FairNode>> owners_;
  std::vector<std::unique_ptr<FairNode>> leaves_;
};

// A tier's policy by itself, with owners by number.
class TierPolicy {
 public:
  TierPolicy(const std::string& name, uint32_t frames) : policy_(make_policy(name, frames)), admitted_(frames) {}

  void admit(uint32_t frame, uint64_t key, uint8_t weight, uint32_t owner, bool alone) {
    if (frame >= admitted_.size())
      throw invalid_argument("frame " + std::to_string(frame) + " of " + std::to_string(admitted_.size()));
    if (admitted_[frame]) policy_->remove(frame);
    policy_->admit(frame, key, weight, domain(owner), alone ? nullptr : &common_);
    admitted_[frame] = true;
  }
  void use(const std::vector<uint32_t>& frames) {
    for (uint32_t frame : frames) check(frame);
    policy_->use(frames);
  }
  void weigh(uint32_t frame, uint8_t weight) { policy_->weigh(check(frame), weight); }
  void remove(uint32_t frame) {
    policy_->remove(check(frame));
    admitted_[frame] = false;
  }
  // -1: of everybody's frames.
  nb::object victim(int64_t owner, const std::vector<uint32_t>& pinned, uint64_t looks) {
    return found(policy_->victim(domain(owner), except(pinned), looks));
  }
  nb::object coldest(int64_t owner, const std::vector<uint32_t>& pinned, uint8_t weight) {
    return found(policy_->coldest(domain(owner), except(pinned), weight));
  }

 private:
  uint32_t check(uint32_t frame) const {
    if (frame >= admitted_.size() || !admitted_[frame])
      throw invalid_argument("frame " + std::to_string(frame) + " has nothing; admit it first");
    return frame;
  }
  Domain& domain(int64_t owner) {
    return owner < 0 ? common_ : owners_.try_emplace(uint32_t(owner), Domain::kOwn).first->second;
  }
  static Policy::Evictable except(const std::vector<uint32_t>& pinned) {
    return [&](uint32_t frame) { return std::find(pinned.begin(), pinned.end(), frame) == pinned.end(); };
  }
  static nb::object found(std::optional<uint32_t> frame) { return frame ? nb::int_(*frame) : nb::object(nb::none()); }

  std::unique_ptr<Policy> policy_;
  std::vector<bool> admitted_;  // by frame
  Domain common_{Domain::kCommon};
  std::map<uint32_t, Domain> owners_;
};

using Keys = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object replayed(const std::string& policy, uint32_t frames, Keys keys) {
  std::vector<uint8_t> hits;
  {
    nb::gil_scoped_release release;
    hits = replay(policy, frames, {keys.data(), keys.shape(0)});
  }
  const size_t count = hits.size();
  return to_array(std::move(hits), {count});
}

nb::tuple drain_accesses(DataPlane& plane) {
  std::pair<std::vector<Access>, uint64_t> drained;
  {
    nb::gil_scoped_release release;
    drained = plane.drain_accesses();
  }
  const auto& [accesses, dropped] = drained;
  return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(accesses.data()), accesses.size() * sizeof(Access)),
                        dropped);
}

// As numpy.dtype takes them.
nb::list access_fields() {
  nb::list fields;
  auto add = [&](const char* name, const char* type) { fields.append(nb::make_tuple(name, type)); };
  add("time_ns", "<u8"), add("pack", "<u8"), add("extent", "<u4"), add("owner", "<u4"), add("worker", "<u4");
  add("slot_epoch", "<u4"), add("slot", "<u2"), add("layer", "<u2"), add("lane", "<u2"), add("wanted", "<u2");
  add("records", "<u2"), add("hit", "|u1"), add("bulk", "|u1"), add("run", "<u4");
  return fields;
}

void bind_policy(nb::module_& m) {
  nb::class_<FairRounds>(m, "FairRounds")
      .def(nb::init<>())
      .def("add", &FairRounds::add, "owner"_a)
      .def(
          "wake", [](FairRounds& r, uint32_t leaf) { r.leaf(leaf).wake(); }, "leaf"_a)
      .def(
          "rest", [](FairRounds& r, uint32_t leaf) { r.leaf(leaf).rest(); }, "leaf"_a)
      .def(
          "charge", [](FairRounds& r, uint32_t leaf, uint64_t bytes) { r.leaf(leaf).charge(bytes); }, "leaf"_a,
          "bytes"_a)
      .def("next", &FairRounds::next);
  nb::class_<Moves>(m, "Moves").def(nb::init<>()).def("move", &Moves::move, "now_ns"_a);
  nb::class_<TierPolicy>(m, "TierPolicy")
      .def(nb::init<const std::string&, uint32_t>(), "name"_a, "frames"_a)
      .def("admit", &TierPolicy::admit, "frame"_a, "key"_a, "weight"_a = 0, "owner"_a = 0, "alone"_a = false)
      .def("use", &TierPolicy::use, "frames"_a)
      .def("weigh", &TierPolicy::weigh, "frame"_a, "weight"_a)
      .def("remove", &TierPolicy::remove, "frame"_a)
      .def("victim", &TierPolicy::victim, "owner"_a = -1, "pinned"_a = std::vector<uint32_t>(),
           "looks"_a = Policy::kLooksMax)
      .def("coldest", &TierPolicy::coldest, "owner"_a = -1, "pinned"_a = std::vector<uint32_t>(), "weight"_a = 1);
  m.def("replay", &replayed, "policy"_a, "frames"_a, "keys"_a);
}

// Microseconds of a request, of a KiB, of a piece.
using Cost = std::tuple<double, double, double>;

Cost cost_of(const DiskCost& cost) { return {cost.request, cost.kib, cost.piece}; }

DiskCost disk_cost_of(const Cost& cost) { return {std::get<0>(cost), std::get<1>(cost), std::get<2>(cost)}; }

void bind_data_plane(nb::module_& m) {
  m.attr("DISK_COST") = nb::cast(cost_of(DiskCost()));
  m.def(
      "measure_disk", [](const std::string& directory) { return cost_of(measure_disk(directory)); }, "directory"_a,
      NoGil());
  m.def("through_blocks", [](const Cost& cost) { return disk_cost_of(cost).through_blocks(); }, "disk_cost"_a);
  nb::class_<DataPlane>(m, "DataPlane")
      .def(
          "__init__",
          [](DataPlane* self, uint64_t dram_bytes, uint32_t io_depth, uint32_t copy_threads, uint32_t spin_us,
             uint32_t extent_blocks, const std::string& window, const std::string& cuda_library,
             const std::string& gdr_library, int gpu, uint64_t arena_bytes, const std::string& tier_policy,
             const Cost& disk_cost, uint64_t learn_bytes) {
            new (self) DataPlane(DataPlaneOptions{dram_bytes,
                                                  io_depth,
                                                  copy_threads,
                                                  spin_us,
                                                  extent_blocks,
                                                  {.kind = window,
                                                   .cuda_library = cuda_library,
                                                   .gdr_library = gdr_library,
                                                   .gpu = gpu,
                                                   .arena_bytes = arena_bytes},
                                                  tier_policy,
                                                  disk_cost_of(disk_cost),
                                                  learn_bytes});
          },
          "dram_bytes"_a, "io_depth"_a, "copy_threads"_a, "spin_us"_a = 30, "extent_blocks"_a = 4, "window"_a = "shm",
          "cuda_library"_a = WindowSettings().cuda_library, "gdr_library"_a = WindowSettings().gdr_library, "gpu"_a = 0,
          "arena_bytes"_a = 0, "tier_policy"_a = policy_names()[0], "disk_cost"_a = cost_of(DiskCost()),
          "learn_bytes"_a = 0, NoGil())
      .def("close", &DataPlane::close, NoGil())
      .def("create_upload", &DataPlane::create_upload, "path"_a, "spec"_a, NoGil())
      .def("upload_missing", &DataPlane::upload_missing, "upload"_a, NoGil())
      .def("finish_upload", &DataPlane::finish_upload, "upload"_a, NoGil())
      .def("abort_upload", &DataPlane::abort_upload, "upload"_a, NoGil())
      .def("open_pack", &DataPlane::open_pack, "path"_a, "owner"_a = 0, NoGil())
      .def("close_pack", &DataPlane::close_pack, "pack"_a, NoGil())
      .def("pack_spec", &DataPlane::pack_header, "pack"_a, NoGil())
      .def("copy_map", &DataPlane::copy_map, "pack"_a, "to_fd"_a, NoGil())
      .def("verify_pack", &DataPlane::verify_pack, "pack"_a, NoGil())
      .def("pack_damaged", &DataPlane::pack_damaged, "pack"_a, NoGil())
      .def("run_samples", &run_samples, "pack"_a)
      .def("rewrite_segment", &rewrite_segment, "pack"_a, "upload"_a, "kind"_a, "layer"_a, "lane"_a, "order"_a)
      .def("warm", &warm, "pack"_a, "hot_records"_a, "owner"_a = 0)
      .def("add_worker", &DataPlane::add_worker, "window_fd"_a, "window_bytes"_a, "staging_fd"_a, "staging_bytes"_a,
           "slots"_a, "owner"_a, "wait_ms"_a = 0, "window"_a = "", NoGil())
      .def("window_descriptor", &DataPlane::window_descriptor, "worker"_a, NoGil())
      .def("arena_descriptor", &DataPlane::arena_descriptor, "worker"_a, NoGil())
      .def_prop_ro("window_kinds", [](DataPlane& plane) { return windows_of(plane)->kinds(); })
      .def(
          "window_pinned_bytes",
          [](DataPlane& plane, const std::string& kind) { return windows_of(plane)->pinned_bytes(kind); }, "kind"_a)
      .def_prop_ro("window_gpu", [](DataPlane& plane) { return windows_of(plane)->gpu(); })
      .def_prop_ro("windows_refused", [](DataPlane& plane) { return windows_of(plane)->refused(); })
      .def("add_ring", &DataPlane::add_ring, "worker"_a, "requests_fd"_a, "completions_fd"_a, "geometry"_a,
           "device"_a = false, NoGil())
      .def("serve_rings", &DataPlane::serve_rings, "worker"_a, NoGil())
      .def("remove_worker", &DataPlane::remove_worker, "worker"_a, NoGil())
      .def("give_back_arenas", &DataPlane::give_back_arenas, NoGil())
      .def("own_upload", &DataPlane::own_upload, "worker"_a, "upload"_a, NoGil())
      .def("bind", &bind_slot, "worker"_a, "slot"_a, "packs"_a, "windows"_a, "record_bytes"_a)
      .def("extend", &DataPlane::extend, "worker"_a, "slot"_a, "pack"_a, NoGil())
      .def("unbind", &DataPlane::unbind, "worker"_a, "slot"_a, NoGil())
      .def_prop_ro("dram_quota_min", &DataPlane::dram_quota_min)
      .def("set_dram_quota", &DataPlane::set_dram_quota, "owner"_a, "bytes"_a, NoGil())
      .def("owners", &DataPlane::owners)
      .def("moved", &DataPlane::moved)
      .def("stats", [](DataPlane& plane) { return figures_of(plane, &DataPlane::stats); })
      .def("census", [](DataPlane& plane) { return figures_of(plane, &DataPlane::census); })
      .def("histograms", &histograms)
      .def("waits", &waits, "worker"_a, "slot"_a, "lanes"_a = 8)
      .def("drain_trace", &drain_trace)
      .def("trace_accesses", &DataPlane::trace_accesses, "seconds"_a)
      .def("drain_accesses", &drain_accesses)
      .def("end_accesses", &DataPlane::end_accesses);
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("BLOCK_BYTES") = kBlockBytes;
  m.attr("HASH_BLOCK_TOKENS") = kHashBlockTokens;
  m.attr("PACK_TOKENS_MAX") = kPackTokensMax;
  m.attr("PACK_VERSION") = kPackVersion;
  m.attr("RING_VERSION") = kRingVersion;
  m.attr("SAMPLED_RUNS") = RunSamples::kRuns;
  m.attr("SAMPLED_EVERY") = RunSamples::kEvery;
  m.attr("WINDOW_KINDS") = nb::tuple(nb::cast(window_kinds()));
  m.attr("DEVICE_WINDOW_KINDS") = nb::tuple(nb::cast(device_window_kinds()));
  m.attr("TIER_POLICIES") = nb::tuple(nb::cast(policy_names()));
  m.attr("ACCESS_FIELDS") = nb::tuple(access_fields());
  m.def("pull_window_bytes", [](uint64_t bytes) { return PullLayout{bytes}.memory_bytes(); }, "window_bytes"_a);
  bind_errors(m);
  bind_shapes(m);
  bind_policy(m);
  bind_data_plane(m);
#ifdef HEADGATE_IO_SHIM
  bind_shim(m);
#endif
  m.def("crc32c", [](nb::bytes data) { return crc32c(0, data.c_str(), data.size()); }, "data"_a);
  m.def("block_crcs", &block_crcs, "build"_a, "first_block"_a, "blocks"_a);
  m.def("crc32c_portable", [](nb::bytes data) { return crc32c_portable(0, data.c_str(), data.size()); }, "data"_a);
}
