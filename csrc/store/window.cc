#include "store/window.h"

#include "store/error.h"
#include "store/shm_window.h"

#ifdef HEADGATE_IO_SHIM
#include "shim/late_window.h"
#endif

namespace headgate {
namespace {

template <typename Kind>
std::unique_ptr<Window> make(int fd, uint64_t bytes) {
  return std::make_unique<Kind>(fd, bytes);
}

struct Maker {
  const char* kind;
  MakeWindow make;
};

constexpr Maker kMakers[] = {
    {"shm", make<ShmWindow>},
#ifdef HEADGATE_IO_SHIM
    {"late", make<shim::LateWindow>},
#endif
};

}  // namespace

const std::vector<std::string>& window_kinds() {
  static const std::vector<std::string> kinds = [] {
    std::vector<std::string> names;
    for (const Maker& maker : kMakers) names.push_back(maker.kind);
    return names;
  }();
  return kinds;
}

MakeWindow window_maker(const std::string& kind) {
  for (const Maker& maker : kMakers)
    if (maker.kind == kind) return maker.make;
  std::string known;
  for (const std::string& name : window_kinds()) known += (known.empty() ? "" : ", ") + name;
  throw invalid_argument("window " + kind + " is not known; known are: " + known);
}

}  // namespace headgate
