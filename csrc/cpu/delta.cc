#include <algorithm>

#include "cpu/query.h"

namespace headgate {

Delta delta(const int32_t* wanted, size_t wanted_count, const int32_t* held, const int32_t* held_places,
            size_t held_count, const int32_t* free_places, size_t free_count) {
  Delta out{std::vector<int32_t>(wanted_count), {}, true};
  out.pairs.resize(2 * std::min(wanted_count, free_count));
  size_t used = 0, h = 0;
  for (size_t w = 0; w < wanted_count; ++w) {
    const int32_t record = wanted[w];
    while (h < held_count && held[h] < record) ++h;
    if (h < held_count && held[h] == record) {
      out.places[w] = held_places[h];
      continue;
    }
    if (used == free_count) return {{}, {}, false};
    out.places[w] = free_places[used];
    out.pairs[2 * used] = static_cast<uint32_t>(record);
    out.pairs[2 * used + 1] = static_cast<uint32_t>(free_places[used]);
    ++used;
  }
  out.pairs.resize(2 * used);
  return out;
}

}  // namespace headgate
