// What only a test build of kvstore_service._native has: the levers of csrc/shim.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "store/disk.h"
#include "store/error.h"
#include "store/faults.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

namespace {

using DiskRule = std::tuple<std::string, std::string, uint64_t, uint64_t, uint64_t>;

void set_disk_rules(const std::vector<DiskRule>& wanted) {
  static const std::map<std::string, shim::Action> actions{
      {"fail", shim::Action::kFail},   {"shorten", shim::Action::kShorten}, {"tear", shim::Action::kTear},
      {"delay", shim::Action::kDelay}, {"skip", shim::Action::kSkip},       {"trust", shim::Action::kTrust}};
  std::vector<shim::Rule> rules;
  for (const auto& [site, action, nth, times, value] : wanted) {
    auto found = actions.find(action);
    if (found == actions.end()) throw invalid_argument("no action " + action);
    rules.push_back({site, found->second, nth, times, value});
  }
  shim::set(std::move(rules));
}

nb::dict disk_counts() {
  nb::dict out;
  auto counts = shim::counts();
  for (size_t i = 0; i < counts.size(); ++i) out[kSiteNames[i]] = nb::make_tuple(counts[i].first, counts[i].second);
  return out;
}

}  // namespace

void bind_shim(nb::module_& m) {
  m.def("io_shim_set", &set_disk_rules, "rules"_a);
  m.def("io_shim_counts", &disk_counts);
  m.def(
      "copy_shim_set",
      [](bool stopped, uint32_t delay_us, bool delay_random, uint32_t fail_every, bool reorder, uint64_t seed,
         int only_thread, uint32_t dawdle_us) {
        shim::set_copy_rules({stopped, only_thread, delay_us, delay_random, fail_every, reorder, dawdle_us, seed});
      },
      "stopped"_a = false, "delay_us"_a = 0, "delay_random"_a = false, "fail_every"_a = 0, "reorder"_a = false,
      "seed"_a = 0, "only_thread"_a = -1, "dawdle_us"_a = 0);
  m.def("alloc_shim_set", &shim::fail_allocations, "nth"_a = 0, "times"_a = 1, "strange"_a = false);
  m.def("alloc_shim_count", &shim::allocations);
}
