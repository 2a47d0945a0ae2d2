#include "bindings/worker_ring.h"

#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/pack.h"
#include "ring/producer.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

namespace {

using Pairs = nb::ndarray<const uint32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

// A contiguous buffer of 32-byte items; structured dtypes do not travel through DLPack.
class RunsView {
 public:
  explicit RunsView(const nb::object& runs) {
    if (PyObject_GetBuffer(runs.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
    if (view_.itemsize == sizeof(Run)) return;
    PyBuffer_Release(&view_);
    throw nb::value_error("runs must be a contiguous array of RUN_DTYPE");
  }
  RunsView(const RunsView&) = delete;
  ~RunsView() { PyBuffer_Release(&view_); }
  std::span<const Run> runs() const { return {static_cast<const Run*>(view_.buf), size_t(view_.len) / sizeof(Run)}; }

 private:
  Py_buffer view_;
};

// Lets a signal's handler run, and end the wait with what it raises.
void check_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

uint64_t post(RingProducer& ring, uint16_t op, uint32_t step, uint16_t layer, const nb::object& runs, Pairs pairs,
              uint64_t timeout_us) {
  RunsView view(runs);
  nb::gil_scoped_release release;
  std::span<const Pair> span(reinterpret_cast<const Pair*>(pairs.data()), pairs.shape(0));
  return ring.post(Op(op), step, layer, view.runs(), span, timeout_us, check_signals);
}

nb::object to_array(const std::vector<RunResult>& results) {
  static_assert(sizeof(RunResult) == 2 * sizeof(uint32_t));
  auto* copy = new std::vector<RunResult>(results);
  nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<RunResult>*>(p); });
  size_t shape[2] = {copy->size(), 2};
  return nb::cast(nb::ndarray<nb::numpy, uint32_t>(copy->data(), 2, shape, owner));
}

nb::object wait(RingProducer& ring, uint64_t seq, uint64_t timeout_us, uint64_t spin_us) {
  const std::vector<RunResult>* results;
  {
    nb::gil_scoped_release release;
    results = &ring.wait(seq, timeout_us, spin_us, check_signals);
  }
  return to_array(*results);
}

// Of a ticket, from its post to its answer, again and again: nanoseconds, without what Python costs.
nb::object round_trips(RingProducer& ring, uint16_t op, uint16_t layer, const nb::object& runs, Pairs pairs,
                       uint32_t rounds, uint64_t timeout_us, uint64_t spin_us) {
  RunsView view(runs);
  auto* took = new std::vector<uint64_t>(rounds);
  nb::capsule owner(took, [](void* p) noexcept { delete static_cast<std::vector<uint64_t>*>(p); });
  {
    nb::gil_scoped_release release;
    std::span<const Pair> span(reinterpret_cast<const Pair*>(pairs.data()), pairs.shape(0));
    for (uint32_t round = 0; round < rounds; ++round) {
      const uint64_t began_ns = now_ns();
      const uint64_t ticket = ring.post(Op(op), round, layer, view.runs(), span, timeout_us, check_signals);
      for (const RunResult& result : ring.wait(ticket, timeout_us, spin_us, check_signals))
        if (result.status != uint32_t(Status::kOk))
          throw RingError("a run of ticket " + std::to_string(ticket) + " failed");
      (*took)[round] = now_ns() - began_ns;
    }
  }
  size_t shape[1] = {rounds};
  return nb::cast(nb::ndarray<nb::numpy, uint64_t>(took->data(), 1, shape, owner));
}

nb::dict layout(const RingProducer& ring) {
  const RingLayout& l = ring.layout();
  const std::pair<const char*, uint64_t> places[] = {
      {"poison", offsetof(RequestsHeader, poison)},
      {"released", offsetof(RequestsHeader, released)},
      {"tickets", l.ticket_off(0)},
      {"runs", l.runs_off(0)},
      {"runs_stride", l.runs_off(1) - l.runs_off(0)},
      {"pairs", l.pairs_off(0)},
      {"pairs_stride", l.pairs_off(1) - l.pairs_off(0)},
      {"daemon_poison", offsetof(CompletionsHeader, poison)},
      {"consumed", offsetof(CompletionsHeader, consumed)},
      {"cells", l.cell_off(0, 0)},
      {"cells_stride", l.cell_off(1, 0) - l.cell_off(0, 0)},
  };
  nb::dict out;
  for (const auto& [name, at] : places) out[name] = at;
  return out;
}

// A view of a ring's memory, which goes when the producer is closed.
template <typename Byte>
nb::object view(Byte* at, uint64_t bytes, nb::handle owner) {
  if (!at) throw RingPoisoned("the ring is closed");
  size_t shape[1] = {bytes};
  return nb::cast(nb::ndarray<nb::numpy, Byte>(at, 1, shape, owner));
}

nb::object run_dtype() {
  nb::list fields;
  auto field = [&](const char* name, const char* type) { fields.append(nb::make_tuple(name, type)); };
  for (const char* name : {"slot", "slot_epoch", "generation", "first_pair", "pair_count"}) field(name, "<u4");
  field("lane", "<u2");
  field("kind", "<u2");
  field("arg", "<u8");
  return nb::module_::import_("numpy").attr("dtype")(fields);
}

template <typename Code>
struct Named {
  const char* name;
  Code code;
};

constexpr Named<Op> kOps[] = {{"GATHER", Op::kGather},   {"RANGE", Op::kRange},   {"STORE", Op::kStore},
                              {"PROMOTE", Op::kPromote}, {"CANCEL", Op::kCancel}, {"PROBE", Op::kProbe}};

constexpr Named<Status> kStatuses[] = {{"NONE", Status::kNone},   {"OK", Status::kOk},
                                       {"MISS", Status::kMiss},   {"ERROR", Status::kError},
                                       {"STALE", Status::kStale}, {"POISON", Status::kPoison}};

constexpr Named<Fault> kFaults[] = {{"INVALID_ARGUMENT", Fault::kInvalidArgument},
                                    {"NOT_FOUND", Fault::kNotFound},
                                    {"RESOURCE_EXHAUSTED", Fault::kResourceExhausted},
                                    {"FAILED_PRECONDITION", Fault::kFailedPrecondition},
                                    {"ABORTED", Fault::kAborted},
                                    {"INTERNAL", Fault::kInternal},
                                    {"UNAVAILABLE", Fault::kUnavailable},
                                    {"DATA_LOSS", Fault::kDataLoss}};

constexpr Named<Dtype> kDtypes[] = {{"FLOAT32", Dtype::kFloat32}, {"BFLOAT16", Dtype::kBfloat16},
                                    {"FLOAT16", Dtype::kFloat16}, {"UINT8", Dtype::kUint8},
                                    {"INT8", Dtype::kInt8},       {"INT4", Dtype::kInt4}};

}  // namespace

void bind_ring(nb::module_& m) {
  nb::exception<RingError> ring_error(m, "RingError", PyExc_RuntimeError);
  nb::exception<NoCredit>(m, "NoCredit", ring_error.ptr());
  nb::exception<RingTimeout>(m, "RingTimeout", ring_error.ptr());
  nb::exception<RingPoisoned>(m, "RingPoisoned", ring_error.ptr());

  for (const auto& [name, op] : kOps) m.attr(("OP_" + std::string(name)).c_str()) = uint32_t(op);
  for (const auto& [name, status] : kStatuses) m.attr(("STATUS_" + std::string(name)).c_str()) = uint32_t(status);
  for (const auto& [name, dtype] : kDtypes) m.attr(("DTYPE_" + std::string(name)).c_str()) = uint32_t(dtype);
  nb::dict fault_names;
  for (const auto& [name, fault] : kFaults) {
    m.attr(("FAULT_" + std::string(name)).c_str()) = uint32_t(fault);
    fault_names[nb::int_(uint32_t(fault))] = name;
  }
  m.attr("FAULT_NAMES") = fault_names;
  m.attr("RUN_DTYPE") = run_dtype();
  m.attr("REQUESTS_HEADER_BYTES") = sizeof(RequestsHeader);
  m.attr("BLOCK_BYTES") = kBlockBytes;

  nb::class_<RingProducer>(m, "RingProducer")
      .def(nb::init<int, int>(), "requests_fd"_a, "completions_fd"_a)
      .def_prop_ro("tickets", [](const RingProducer& r) { return r.geometry().tickets; })
      .def_prop_ro("runs_max", [](const RingProducer& r) { return r.geometry().runs_max; })
      .def_prop_ro("pairs_max", [](const RingProducer& r) { return r.geometry().pairs_max; })
      .def_prop_ro("poisoned", &RingProducer::poisoned)
      .def_prop_ro("in_flight", &RingProducer::in_flight)
      .def("has_room_for_hint", &RingProducer::has_room_for_hint)
      .def("post", &post, "op"_a, "step"_a, "layer"_a, "runs"_a, "pairs"_a, "timeout_us"_a = 2'000'000)
      .def(
          "poll", [](RingProducer& ring, uint64_t seq) { return to_array(ring.poll(seq)); }, "seq"_a)
      .def("wait", &wait, "seq"_a, "timeout_us"_a, "spin_us"_a = 30)
      .def("round_trips", &round_trips, "op"_a, "layer"_a, "runs"_a, "pairs"_a, "rounds"_a, "timeout_us"_a, "spin_us"_a)
      .def("begin_steps", &RingProducer::begin_steps)
      .def("end_steps", &RingProducer::end_steps)
      .def_prop_ro("layout", &layout)
      .def_prop_ro("requests",
                   [](nb::handle self) {
                     const auto& ring = nb::cast<const RingProducer&>(self);
                     return view<uint8_t>(ring.requests(), ring.layout().requests_bytes(), self);
                   })
      .def_prop_ro("completions",
                   [](nb::handle self) {
                     const auto& ring = nb::cast<const RingProducer&>(self);
                     return view<const uint8_t>(ring.completions(), ring.layout().completions_bytes(), self);
                   })
      .def("poison", &RingProducer::poison)
      .def("heartbeat_ns", &RingProducer::heartbeat_ns)
      .def("close", &RingProducer::close);
}
