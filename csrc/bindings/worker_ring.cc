#include "bindings/worker_ring.h"

#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <string>

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

nb::object run_dtype() {
  nb::list fields;
  auto field = [&](const char* name, const char* type) { fields.append(nb::make_tuple(name, type)); };
  for (const char* name : {"slot", "slot_epoch", "generation", "first_pair", "pair_count"}) field(name, "<u4");
  field("lane", "<u2");
  field("kind", "<u2");
  field("arg", "<u8");
  return nb::module_::import_("numpy").attr("dtype")(fields);
}

}  // namespace

void bind_ring(nb::module_& m) {
  nb::exception<RingError> ring_error(m, "RingError", PyExc_RuntimeError);
  nb::exception<NoCredit>(m, "NoCredit", ring_error.ptr());
  nb::exception<RingTimeout>(m, "RingTimeout", ring_error.ptr());
  nb::exception<RingPoisoned>(m, "RingPoisoned", ring_error.ptr());

  m.attr("OP_GATHER") = uint32_t(Op::kGather);
  m.attr("OP_RANGE") = uint32_t(Op::kRange);
  m.attr("OP_STORE") = uint32_t(Op::kStore);
  m.attr("OP_PROMOTE") = uint32_t(Op::kPromote);
  m.attr("OP_CANCEL") = uint32_t(Op::kCancel);
  m.attr("STATUS_OK") = uint32_t(Status::kOk);
  m.attr("STATUS_ERROR") = uint32_t(Status::kError);
  m.attr("STATUS_STALE") = uint32_t(Status::kStale);
  m.attr("STATUS_POISON") = uint32_t(Status::kPoison);
  m.attr("RUN_DTYPE") = run_dtype();

  nb::class_<RingProducer>(m, "RingProducer")
      .def(nb::init<int, int>(), "requests_fd"_a, "completions_fd"_a)
      .def_prop_ro("tickets", [](const RingProducer& r) { return r.geometry().tickets; })
      .def_prop_ro("runs_max", [](const RingProducer& r) { return r.geometry().runs_max; })
      .def_prop_ro("pairs_max", [](const RingProducer& r) { return r.geometry().pairs_max; })
      .def_prop_ro("poisoned", &RingProducer::poisoned)
      .def_prop_ro("in_flight", &RingProducer::in_flight)
      .def("post", &post, "op"_a, "step"_a, "layer"_a, "runs"_a, "pairs"_a, "timeout_us"_a = 2'000'000)
      .def(
          "poll", [](RingProducer& ring, uint64_t seq) { return to_array(ring.poll(seq)); }, "seq"_a)
      .def("wait", &wait, "seq"_a, "timeout_us"_a, "spin_us"_a = 30)
      .def("poison", &RingProducer::poison)
      .def("heartbeat_ns", &RingProducer::heartbeat_ns)
      .def("close", &RingProducer::close);
}
