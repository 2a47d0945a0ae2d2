#include "bindings/worker_window.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <string>
#include <tuple>

#include "core/probe.h"
#include "core/pull.h"
#include "gpu/device_memory.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class ImportedWindow {
 public:
  ImportedWindow(int fd, uint64_t bytes, const std::string& cuda_library, int gpu)
      : bytes_(bytes), memory_(DeviceMemory::import(std::make_shared<CudaDriver>(cuda_library, gpu), bytes, fd)) {}

  uint64_t address() const { return memory().address(); }
  nb::bytes read(uint64_t at, uint64_t count) const {
    check(at, count);
    std::string copy(count, '\0');
    {
      nb::gil_scoped_release release;
      memory().driver().read(copy.data(), memory().address() + at, count);
    }
    return nb::bytes(copy.data(), copy.size());
  }
  void write(uint64_t at, Bytes from) const {
    check(at, from.shape(0));
    nb::gil_scoped_release release;
    memory().driver().write(memory().address() + at, from.data(), from.shape(0));
  }
  void close() { memory_.reset(); }

 private:
  const DeviceMemory& memory() const {
    if (!memory_) throw DeviceError("the window is closed");
    return *memory_;
  }
  void check(uint64_t at, uint64_t count) const {
    if (at > bytes_ || count > bytes_ - at) throw std::invalid_argument("beyond the window's end");
  }

  const uint64_t bytes_;
  std::unique_ptr<DeviceMemory> memory_;
};

nb::bytes probe() {
  std::string bytes;
  for (uint32_t i = 0; i < kProbeBytes; ++i) bytes.push_back(char(probe_byte(i)));
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void bind_window(nb::module_& m) {
  m.attr("WINDOW_PROBE") = probe();
  m.attr("PULL_LINE_BYTES") = kPullLineBytes;
  m.def(
      "pull_layout",
      [](uint64_t bytes) {
        PullLayout layout{bytes};
        return std::make_tuple(layout.lines_off(), layout.lines(), layout.memory_bytes());
      },
      "window_bytes"_a);
  nb::class_<ImportedWindow>(m, "ImportedWindow")
      .def(nb::init<int, uint64_t, const std::string&, int>(), "fd"_a, "size_bytes"_a, "cuda_library"_a, "gpu"_a)
      .def_prop_ro("address", &ImportedWindow::address)
      .def("read", &ImportedWindow::read, "at"_a, "count"_a)
      .def("write", &ImportedWindow::write, "at"_a, "values"_a)
      .def("close", &ImportedWindow::close);
}
