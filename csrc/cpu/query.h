// The retrieval side of a decode step: is the label still near, which records are nearest, what must travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hamming.h"

namespace headgate {

// docs/qsac.md step 3 for one KV head: the importance-weighted harmonic mean of `group` cosines of d elements each;
// NaN where a norm is zero.
float similarity(const float* query, const float* label, const float* weights, int group, int d, float cos_floor);

// Bit j of row i is (x[i] - centre) . projection[:, j] > 0. x: [n][d], projection: [d][256], codes: [n][4].
void hash_encode(const float* x, const float* projection, const float* centre, size_t n, int d, uint64_t* codes);

struct PackCodes {
  const uint64_t* codes;  // [count][4], in record order
  const uint16_t* map;    // [count], record -> token within the pack
  size_t count;
  int32_t first;  // the pack's first record, and its first token
};

// The k records of least Hamming distance, summed over `group` query codes, among those whose token lies in [low,
// high); ties to the lower id; sorted by id. Packs come in ascending order.
std::vector<int32_t> hash_select(const uint64_t* query_codes, int group, const std::vector<PackCodes>& packs,
                                 int32_t low, int32_t high, size_t k);

struct Delta {
  std::vector<int32_t> places;  // of every wanted record
  std::vector<uint32_t> pairs;  // (record, place) of those that are not held
  bool fits;                    // false: the free places do not suffice, and both are empty
};

// wanted, held: sorted record ids.
Delta delta(const int32_t* wanted, size_t wanted_count, const int32_t* held, const int32_t* held_places,
            size_t held_count, const int32_t* free_places, size_t free_count);

}  // namespace headgate
