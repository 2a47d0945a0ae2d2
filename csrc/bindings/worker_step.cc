// decode_worker._native.Step: one decode step on the CPU over the tensors of decode_worker/kernels/state.py.
#include "bindings/worker_step.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/worker_ring.h"
#include "cpu/hash_selector.h"
#include "cpu/step.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

// Asks a retriever that is written in Python.
class PythonSelector : public Selector {
 public:
  PythonSelector(const RecordMaps& maps, nb::object select, int group, int d)
      : maps_(maps), select_(std::move(select)), group_(group), d_(d) {}

  void select(int layer, int slot, int head, const float* query, const Selection& wanted, int,
              std::vector<int32_t>& out) override {
    nb::gil_scoped_acquire acquire;
    size_t shape[2] = {size_t(group_), size_t(d_)};
    nb::ndarray<nb::numpy, const float> view(query, 2, shape, nb::handle());
    nb::object found =
        select_(layer, slot, head, nb::cast(view, nb::rv_policy::copy), wanted.low, wanted.high, wanted.k, wanted.unit);
    auto ids = nb::cast<nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(found);
    require(ids.size() <= size_t(wanted.k), "a retriever selected more than it was asked for");
    const std::vector<PackMap>& packs = maps_.packs(slot);
    const int32_t stored = packs.empty() ? 0 : packs.back().first + packs.back().tokens;
    int32_t before = -1;
    for (size_t i = 0; i < ids.size(); before = ids.data()[i++]) {
      const int32_t id = ids.data()[i];
      require(id > before && id < stored / wanted.unit,
              "a retriever selected " + std::to_string(id) + " behind " + std::to_string(before) + " of " +
                  std::to_string(stored / wanted.unit) + " units: ids must ascend from 0 and be stored");
    }
    out.assign(ids.data(), ids.data() + ids.size());
  }
  bool parallel() const override { return false; }

 private:
  const RecordMaps& maps_;
  nb::object select_;
  int group_, d_;
};

// The arrays that a step works on, and what keeps them alive.
class StateArrays {
 public:
  explicit StateArrays(nb::object owner) : owner_(std::move(owner)) {
    HeadState::Shape& shape = state.shape;
    nb::object sizes = owner_.attr("shape");
    const auto size = [&](const char* name) { return nb::cast<int>(sizes.attr(name)); };
    shape = {size("layers"), size("slots"), size("heads"), size("group"),  size("head_dim"), size("places"),
             size("units"),  size("unit"),  size("sink"),  size("recent"), size("tail")};
    const size_t heads = size_t(shape.layers) * shape.slots * shape.heads, lanes = size_t(shape.layers) * shape.heads;
    const size_t floats = size_t(shape.group) * shape.d;
    take("held", 2 * heads * shape.units, state.held);
    take("held_places", 2 * heads * shape.units, state.held_places);
    take("held_count", 2 * heads, state.held_count);
    take("places", 2 * heads * shape.places, state.places);
    take("count", 2 * heads, state.count);
    take("label", 2 * heads * floats, state.label);
    take("label_kind", 2 * heads, state.label_kind);
    take("cover", 2 * heads, state.cover);
    take("generation", 2 * heads, state.generation);
    take("parity", heads, state.parity);
    take("issued", heads, state.issued);
    take("stamp", heads * shape.units, state.stamp);
    take("base", heads, state.base);
    take("own", heads, state.own);
    take("selected", heads, state.selected);
    take("capacity", heads, state.capacity);
    take("chosen", heads, state.chosen);
    take("missing", heads, state.missing);
    take("tau", lanes, state.tau);
    take("weights", lanes * shape.group, state.weights);
    take("resident", lanes, state.resident);
    take("forced_from", lanes, state.forced_from);
    take("stored", shape.slots, state.stored);
    take("first_position", shape.slots, state.first_position);
    take("epoch", shape.slots, state.epoch);
    take("fault", shape.slots, state.fault);
    take("counters", size_t(Counter::kCount), state.counters);
  }

  HeadState state{};

 private:
  template <class T>
  void take(const char* name, size_t size, T*& out) {
    // Never a converted copy: what the kernels change must be what the owner sees.
    Array<std::remove_const_t<T>> array;
    if (!nb::try_cast(owner_.attr(name), array, false))
      throw std::invalid_argument(std::string("state.") + name + " has another dtype or is not contiguous");
    require(array.size() == size, std::string("state.") + name + " has another size");
    out = array.data();
    kept_.push_back(owner_.attr(name));
  }

  nb::object owner_;
  std::vector<nb::object> kept_;
};

void check_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

std::vector<RingProducer*> producers(const nb::list& rings) {
  require(rings.size() <= kRingsMax, "a step has at most " + std::to_string(kRingsMax) + " rings");
  std::vector<RingProducer*> all;
  for (nb::handle ring : rings) all.push_back(nb::cast<RingProducer*>(ring));
  return all;
}

class BoundStep {
 public:
  BoundStep(nb::object state, nb::object retriever_select, std::optional<Array<const float>> projection, nb::list rings,
            Array<uint8_t> window, bool reuses, bool keeps, bool whole, int stamp, float cos_floor,
            const std::vector<std::pair<int, size_t>>& kinds, float scale, int threads, bool stale_fails,
            uint64_t wait_us, int ahead_steps, int64_t ahead_records_max)
      : arrays_(std::move(state)),
        ring_objects_(std::move(rings)),
        rings_(producers(ring_objects_)),
        window_(std::move(window)),
        maps_(arrays_.state.shape.slots, arrays_.state.shape.heads),
        kept_(arrays_.state.shape.slots) {
    const HeadState::Shape& shape = arrays_.state.shape;
    require(shape.d % 16 == 0, "head_dim must be a multiple of 16");
    require(kinds.size() == 1 || kinds.size() == 2, "kinds must be those of the worker's records and of packs");
    require(threads >= 1, "threads must be at least 1");
    require(shape.group <= kHashGroupMax, "a KV head must have at most 128 query heads");
    require(stamp >= 0 && stamp <= 2, "stamp must be 0 (none), 1 (step) or 2 (count)");
    if (projection) {
      require(projection->size() == size_t(shape.layers) * shape.heads * shape.d * kHashBits,
              "projection must be [layers, heads, d, 256]");
      projection_ = *projection;
      auto hash =
          std::make_unique<HashSelector>(maps_, projection_.data(), shape.slots, shape.heads, shape.group, shape.d);
      hash_ = hash.get();
      selector_ = std::move(hash);
    } else {
      selector_ = std::make_unique<PythonSelector>(maps_, std::move(retriever_select), shape.group, shape.d);
    }
    const LookUpRules rules{{keeps, whole, static_cast<CacheRule::Stamp>(stamp)}, reuses, cos_floor, threads};
    require(ahead_steps >= 0, "ahead_steps must be at least 0");
    const LookAheadRules ahead{ahead_steps, ahead_records_max, reuses, whole, cos_floor, threads};
    const RecordKind own = record_kind(kinds.front().first, shape.d, kinds.front().second);
    const RecordKind stored = record_kind(kinds.back().first, shape.d, kinds.back().second);
    require(own.dtype == Dtype::kFloat32 || own.dtype == Dtype::kBfloat16, "a worker writes float32 or bfloat16");
    const StepSettings settings{own, stored, int(kinds.size()), scale, threads, stale_fails, wait_us};
    step_ = std::make_unique<Step>(arrays_.state, maps_, *selector_, rules, settings, ahead, window_.data(),
                                   window_.size());
  }

  void extend(int slot, int32_t first, Array<const uint16_t> order, std::optional<Array<const uint64_t>> codes) {
    const HeadState::Shape& shape = arrays_.state.shape;
    const size_t lanes = size_t(shape.layers) * shape.heads;
    require(slot >= 0 && slot < shape.slots, "slot is out of range");
    require(order.ndim() == 3 && order.size() == lanes * order.shape(2), "order must be [layers, heads, tokens]");
    require(!hash_ || (codes && codes->size() == order.size() * kHashWords),
            "codes must be [layers, heads, tokens, 4]");
    maps_.extend(slot, {order.data(), first, int32_t(order.shape(2))});
    if (hash_) hash_->extend(slot, codes->data());
    kept_[slot].push_back(nb::cast(order));
    if (codes) kept_[slot].push_back(nb::cast(*codes));
  }

  void clear(int slot) {
    maps_.clear(slot);
    if (hash_) hash_->clear(slot);
    kept_.at(slot).clear();
  }

  void begin(Array<const int32_t> slots, Array<const int32_t> positions, int rows, int32_t step) {
    require(rows >= 0 && slots.size() >= size_t(rows) && positions.size() >= size_t(rows), "begin: too many rows");
    for (int i = 0; i < rows; ++i) {
      require(slots.data()[i] >= -1 && slots.data()[i] < arrays_.state.shape.slots, "begin: slot is out of range");
      require(positions.data()[i] >= 0, "begin: position is negative");
    }
    slots_ = slots;
    positions_ = positions;
    rows_ = rows;
    step_->begin({rows, slots_.data(), positions_.data(), step});
  }

  // Without rings: what a step would post, for whoever stores it himself.
  nb::tuple plan(int layer, Array<const float> query, int kind) {
    check_query(layer, query);
    {
      Rings none;
      nb::gil_scoped_release release;
      step_->look_up(none, layer, query.data(), static_cast<QueryKind>(kind), {});
    }
    return ticket(step_->outbox());
  }

  nb::tuple plan_ahead(int layer, Array<const float> query) {
    check_query(layer, query);
    {
      Rings none;
      nb::gil_scoped_release release;
      step_->look_ahead(none, layer, query.data());
    }
    return ticket(step_->hints());
  }

  void look_ahead(int layer, Array<const float> query) {
    check_query(layer, query);
    nb::gil_scoped_release release;
    step_->look_ahead(rings_, layer, query.data());
  }

  void commit(int layer, std::optional<Array<const uint32_t>> statuses) {
    check_layer(layer);
    std::vector<RunResult> results;
    for (size_t i = 0; statuses && i < statuses->size() / 2; ++i)
      results.push_back({statuses->data()[2 * i], statuses->data()[2 * i + 1]});
    step_->commit(layer, results);
  }

  void look_up(int layer, Array<const float> query, int kind) {
    check_query(layer, query);
    nb::gil_scoped_release release;
    step_->look_up(rings_, layer, query.data(), static_cast<QueryKind>(kind), check_signals);
  }

  void arrive(int layer, Array<const float> key, Array<const float> value) {
    check_token(layer, key, value);
    nb::gil_scoped_release release;
    if (!rings_.empty()) step_->await(rings_, layer, wait_us(), check_signals);
    step_->append(layer, key.data(), value.data());
  }

  void append(int layer, Array<const float> key, Array<const float> value) {
    check_token(layer, key, value);
    nb::gil_scoped_release release;
    step_->append(layer, key.data(), value.data());
  }

  void await(int layer) {
    check_layer(layer);
    nb::gil_scoped_release release;
    step_->await(rings_, layer, wait_us(), check_signals);
  }

  void attend(int layer, Array<const float> query, Array<float> out, Array<float> lse) {
    check_query(layer, query);
    require(out.size() >= query_floats() && lse.size() >= query_floats() / arrays_.state.shape.d,
            "attend: out must be [rows, heads * group, d] and lse [rows, heads * group]");
    nb::gil_scoped_release release;
    step_->attend(layer, query.data(), out.data(), lse.data());
  }

  // After a failed step: no ticket is left behind. What a poisoned ring does not answer was never posted.
  void settle(uint64_t timeout_us) {
    nb::gil_scoped_release release;
    for (int layer = 0; layer < arrays_.state.shape.layers; ++layer) {
      if (!step_->awaits(layer)) continue;
      try {
        step_->await(rings_, layer, timeout_us, {});
      } catch (const RingError&) {
        step_->commit(layer, {});
      }
    }
  }

  uint64_t wait_us() const { return step_->settings().wait_us; }

 private:
  static nb::tuple ticket(const Outbox& out) {
    return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(out.runs.data()), out.runs.size() * sizeof(Run)),
                          nb::bytes(reinterpret_cast<const char*>(out.pairs.data()), out.pairs.size() * sizeof(Pair)));
  }
  size_t query_floats() const {
    const HeadState::Shape& shape = arrays_.state.shape;
    return size_t(rows_) * shape.heads * shape.group * shape.d;
  }
  void check_layer(int layer) const {
    require(layer >= 0 && layer < arrays_.state.shape.layers, "layer is out of range");
  }
  void check_token(int layer, const Array<const float>& key, const Array<const float>& value) const {
    check_layer(layer);
    const HeadState::Shape& shape = arrays_.state.shape;
    const size_t floats = size_t(rows_) * shape.heads * shape.d;
    require(key.size() >= floats && value.size() >= floats, "key and value must be [rows, heads, d]");
  }
  void check_query(int layer, const Array<const float>& query) const {
    check_layer(layer);
    require(query.size() >= query_floats(), "query must be [rows, heads * group, d]");
  }

  StateArrays arrays_;
  nb::list ring_objects_;
  Rings rings_;
  Array<uint8_t> window_;
  RecordMaps maps_;
  std::vector<std::vector<nb::object>> kept_;  // arrays of each slot's packs
  Array<const float> projection_;
  std::unique_ptr<Selector> selector_;
  HashSelector* hash_ = nullptr;
  std::unique_ptr<Step> step_;
  Array<const int32_t> slots_, positions_;
  int rows_ = 0;
};

}  // namespace

void bind_step(nb::module_& m) {
  m.attr("FAULT_TAIL_FULL") = int32_t(StepFault::kTailFull);
  m.attr("FAULT_NOT_POSTED") = int32_t(StepFault::kNotPosted);
  nb::class_<BoundStep>(m, "Step")
      .def(nb::init<nb::object, nb::object, std::optional<Array<const float>>, nb::list, Array<uint8_t>, bool, bool,
                    bool, int, float, const std::vector<std::pair<int, size_t>>&, float, int, bool, uint64_t, int,
                    int64_t>(),
           "state"_a, "select"_a.none(), "projection"_a.none(), "rings"_a, "window"_a.noconvert(), nb::kw_only(),
           "reuses"_a, "keeps"_a, "whole"_a, "stamp"_a, "cos_floor"_a, "kinds"_a, "scale"_a, "threads"_a,
           "stale_fails"_a, "wait_us"_a, "ahead_steps"_a, "ahead_records_max"_a)
      .def("extend", &BoundStep::extend, "slot"_a, "first"_a, "order"_a, "codes"_a.none())
      .def("clear", &BoundStep::clear, "slot"_a)
      .def("begin", &BoundStep::begin, "slots"_a.noconvert(), "positions"_a.noconvert(), "rows"_a, "step"_a)
      .def("plan", &BoundStep::plan, "layer"_a, "query"_a.noconvert(), "kind"_a)
      .def("commit", &BoundStep::commit, "layer"_a, "statuses"_a.none())
      .def("look_up", &BoundStep::look_up, "layer"_a, "query"_a.noconvert(), "kind"_a)
      .def("plan_ahead", &BoundStep::plan_ahead, "layer"_a, "query"_a.noconvert())
      .def("look_ahead", &BoundStep::look_ahead, "layer"_a, "query"_a.noconvert())
      .def("arrive", &BoundStep::arrive, "layer"_a, "key"_a.noconvert(), "value"_a.noconvert())
      .def("append", &BoundStep::append, "layer"_a, "key"_a.noconvert(), "value"_a.noconvert())
      .def("await_ticket", &BoundStep::await, "layer"_a)
      .def("attend", &BoundStep::attend, "layer"_a, "query"_a.noconvert(), "out"_a.noconvert(), "lse"_a.noconvert())
      .def("settle", &BoundStep::settle, "timeout_us"_a);
}
