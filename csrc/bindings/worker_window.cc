#include "bindings/worker_window.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/probe.h"
#include "core/pull.h"
#include "gpu/device_memory.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

namespace {

class ImportedWindow {
 public:
  ImportedWindow(int fd, uint64_t bytes, bool for_rdma, const std::string& cuda_library, int gpu)
      : memory_(DeviceMemory::import(std::make_shared<CudaDriver>(cuda_library, gpu), bytes, for_rdma, fd)) {}

  uint64_t address() const {
    if (!memory_) throw DeviceError("the window is closed");
    return memory_->address();
  }
  void close() { memory_.reset(); }

 private:
  std::unique_ptr<DeviceMemory> memory_;
};

nb::object probe_lines(uint32_t seed, uint64_t first, uint64_t count) {
  auto* lines = new std::vector<uint32_t>(count * kProbeWords);
  nb::capsule owner(lines, [](void* p) noexcept { delete static_cast<std::vector<uint32_t>*>(p); });
  for (uint64_t i = 0; i < count; ++i) probe_line(seed, first + i, lines->data() + i * kProbeWords);
  size_t shape[2] = {count, kProbeWords};
  return nb::cast(nb::ndarray<nb::numpy, uint32_t>(lines->data(), 2, shape, owner));
}

}  // namespace

void bind_window(nb::module_& m) {
  m.attr("PROBE_BYTES") = kProbeBytes;
  m.attr("PROBE_LINES_MAX") = kProbeLinesMax;
  m.def("probe_lines", &probe_lines, "seed"_a, "first_line"_a, "count"_a);
  m.attr("PULL_LINE_BYTES") = kPullLineBytes;
  m.def(
      "pull_layout",
      [](uint64_t bytes) {
        PullLayout layout{bytes};
        return std::make_tuple(layout.lines_off(), layout.lines(), layout.memory_bytes());
      },
      "window_bytes"_a);
  m.def(
      "gpu_uuid", [](const std::string& cuda_library, int gpu) { return CudaDriver(cuda_library, gpu).uuid(); },
      "cuda_library"_a, "gpu"_a);
  nb::class_<ImportedWindow>(m, "ImportedWindow")
      .def(nb::init<int, uint64_t, bool, const std::string&, int>(), "fd"_a, "size_bytes"_a, "for_rdma"_a,
           "cuda_library"_a, "gpu"_a)
      .def_prop_ro("address", &ImportedWindow::address)
      .def("close", &ImportedWindow::close);
}
