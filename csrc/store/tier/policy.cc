#include "store/tier/policy.h"

#include "store/error.h"
#include "store/tier/clock.h"
#include "store/tier/lfu.h"
#include "store/tier/recency.h"
#include "store/tier/s3fifo.h"

namespace headgate {
namespace {

template <typename P>
std::unique_ptr<Policy> make(uint32_t frames) {
  return std::make_unique<P>(frames);
}

struct Named {
  const char* name;
  std::unique_ptr<Policy> (*make)(uint32_t frames);
};

constexpr Named kPolicies[] = {
    {"lfu", make<Lfu>}, {"clock", make<Clock>}, {"s3fifo", make<S3Fifo>}, {"lru", make<Lru>}, {"fifo", make<Fifo>}};

}  // namespace

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Named& policy : kPolicies) all.emplace_back(policy.name);
    return all;
  }();
  return names;
}

std::unique_ptr<Policy> make_policy(const std::string& name, uint32_t frames) {
  for (const Named& policy : kPolicies)
    if (name == policy.name) return policy.make(frames);
  std::string names;
  for (const std::string& known : policy_names()) names += (names.empty() ? "" : ", ") + known;
  throw invalid_argument("tier_policy = " + name + " is none; choose one of " + names);
}

}  // namespace headgate
