#include "store/window.h"

#include <algorithm>
#include <optional>

#include "store/error.h"
#include "store/gdr_window.h"
#include "store/pull_window.h"
#include "store/shm_window.h"
#include "store/staged_window.h"

#ifdef HEADGATE_IO_SHIM
#include "shim/late_window.h"
#endif

namespace headgate {
namespace {

constexpr uint64_t kTestBytes = 64 << 10;

using Make = std::function<std::unique_ptr<Window>(int fd, uint64_t bytes)>;

// The driver is looked for once, by the first kind that needs it; the others hear the same error.
class Driver {
 public:
  explicit Driver(const WindowSettings& settings) : settings_(settings) {}
  const std::shared_ptr<CudaDriver>& get() {
    if (error_) throw *error_;
    try {
      if (!driver_) {
        auto driver = std::make_shared<CudaDriver>(settings_.cuda_library, settings_.gpu);
        uuid_ = driver->uuid();
        driver_ = std::move(driver);
      }
    } catch (const DeviceError& error) {
      throw error_.emplace(error_of(error));
    }
    return driver_;
  }
  // Its device's; empty until a kind has needed it.
  const std::string& uuid() const { return uuid_; }

 private:
  const WindowSettings& settings_;
  std::shared_ptr<CudaDriver> driver_;
  std::string uuid_;
  std::optional<Error> error_;
};

// Throws Error with the reason why the kind cannot be had on this machine.
using Prepare = Make (*)(const WindowSettings&, Driver&);

template <typename Kind>
Make shared(const WindowSettings&, Driver&) {
  return [](int fd, uint64_t bytes) { return std::make_unique<Kind>(fd, bytes); };
}

template <typename Device, typename Kind>
Make on_device(const WindowSettings& settings, Driver& driver) {
  auto device = std::make_shared<Device>(driver.get(), settings);
  Kind(device, kTestBytes).self_test();
  return [device](int, uint64_t bytes) { return std::make_unique<Kind>(device, bytes); };
}

Make pull(const WindowSettings& settings, Driver& driver) {
  if (settings.arena_bytes == 0) throw failed_precondition("arena_bytes is 0; set it to have windows of this kind");
  return shared<PullWindow>(settings, driver);
}

struct Kind {
  const char* name;
  Prepare prepare;
  bool on_device;
  bool automatic;
  uint64_t pinned_bytes = 0;  // for each copy thread
};

constexpr Kind kKinds[] = {
    {"gdr", on_device<GdrDevice, GdrWindow>, true, true},
    {"pull", pull, false, true},
    {"staged", on_device<StagedDevice, StagedWindow>, true, true, CopyLane::kBytes},
    {"shm", shared<ShmWindow>, false, true},
#ifdef HEADGATE_IO_SHIM
    {"late", shared<shim::LateWindow>, false, false},
#endif
};

template <typename Condition>
std::vector<std::string> names(Condition condition) {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds)
    if (condition(kind)) names.push_back(kind.name);
  return names;
}

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

const std::vector<std::string>& window_kinds() {
  static const std::vector<std::string> kinds = names([](const Kind&) { return true; });
  return kinds;
}

const std::vector<std::string>& device_window_kinds() {
  static const std::vector<std::string> kinds = names([](const Kind& kind) { return kind.on_device; });
  return kinds;
}

Windows::Windows(const WindowSettings& settings) : threads_(settings.threads) {
  if (settings.kind != "auto" && std::ranges::count(window_kinds(), settings.kind) == 0)
    throw invalid_argument("window " + settings.kind + " is not known; known are: " + list(window_kinds()));
  Driver driver(settings);
  for (const Kind& kind : kKinds) {
    if (settings.kind == kind.name) {
      made_.emplace_back(kind.name, kind.prepare(settings, driver));
    } else if (settings.kind == "auto" && kind.automatic) {
      try {
        made_.emplace_back(kind.name, kind.prepare(settings, driver));
      } catch (const Error& error) {
        refused_.emplace_back(kind.name, error.what());
      }
    }
  }
  gpu_ = driver.uuid();
}

std::vector<std::string> Windows::kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [kind, make] : made_) kinds.push_back(kind);
  return kinds;
}

uint64_t Windows::pinned_bytes(const std::string& kind) const {
  uint64_t bytes = 0;
  for (const Kind& known : kKinds)
    if (kind == known.name) bytes = known.pinned_bytes * threads_;
  return bytes;
}

std::unique_ptr<Window> Windows::make(const std::string& kind, int fd, uint64_t bytes) const {
  for (const auto& [name, make] : made_)
    if (kind.empty() || kind == name) return make(fd, bytes);
  throw failed_precondition("windows of kind " + kind + " are not made here; there are: " + list(kinds()));
}

}  // namespace headgate
