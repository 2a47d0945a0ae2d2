// The retrieval side of a decode step: is the label still near, which records are nearest, what must travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hamming.h"
#include "cpu/selector.h"

namespace headgate {

// docs/qsac.md step 3 for one KV head: the importance-weighted harmonic mean of `group` cosines of d elements each;
// NaN where a norm is zero.
double similarity(const float* query, const float* label, const float* weights, int group, int d, float cos_floor);

// Bit j of row i is (x[i] - centre) . projection[:, j] > 0. x: [n][d], projection: [d][256], codes: [n][4].
void hash_encode(const float* x, const float* projection, const float* centre, size_t n, int d, uint64_t* codes);

struct PackCodes {
  const uint64_t* codes;  // [count][4], in record order
  const uint16_t* map;    // [count], record -> token within the pack
  size_t count;
  int32_t first;  // the pack's first record, and its first token
};

// The units of least Hamming distance, summed over `group` query codes; a unit's is its nearest record's. Ties go to
// the lower token, of units to the lower id. Packs come in ascending order, without a gap from record 0, in whole
// units.
void hash_select(const uint64_t* query_codes, int group, const std::vector<PackCodes>& packs, const Selection& wanted,
                 int threads, std::vector<int32_t>& out);

}  // namespace headgate
