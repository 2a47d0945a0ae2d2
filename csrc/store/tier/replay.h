// What a tier of one owner would have had, under a policy.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace headgate {

// For each access, by the extent's key, whether it is a hit. The tier begins empty.
std::vector<uint8_t> replay(const std::string& policy, uint32_t frames, std::span<const uint64_t> keys);

}  // namespace headgate
