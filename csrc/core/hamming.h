// The distance of a key's code from the codes of all queries of its KV head: Hamming distances, summed.
//
// The g query codes fold into few bit planes. With n_j of the g codes having bit j set, a key pays n_j for a clear bit
// and g - n_j for a set one, that is min(n_j, g - n_j), and |g - 2 n_j| more where it differs from the majority. So
//     distance = sum_j min(n_j, g - n_j) + sum_b 2^b popcount((key ^ majority) & plane_b)
// with plane_b bit b of |g - 2 n_j|: two population counts instead of four for g = 4, three instead of eight for g = 8.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace headgate {

inline constexpr int kHashBits = 256;
inline constexpr int kHashWords = kHashBits / 64;
inline constexpr int kHashGroupMax = 128;  // query heads per KV head: distances fit 16 bits
inline constexpr int kHashPlanesMax = 8;
static_assert(kHashGroupMax < 1 << kHashPlanesMax && kHashGroupMax * kHashBits < 0xffff);

struct HashPlanes {
  uint64_t majority[kHashWords];
  uint64_t mask[kHashPlanesMax][kHashWords];  // of the planes that are not empty
  int weight_log[kHashPlanesMax];
  int count;
  int floor;  // what every key pays
  int most;   // the largest possible distance
};

// codes: [group][kHashWords], of at most kHashGroupMax queries.
HEADGATE_HD inline HashPlanes fold_codes(const uint64_t* codes, int group) {
  HashPlanes p{};
  uint64_t mask[kHashPlanesMax][kHashWords] = {};
  for (int j = 0; j < kHashBits; ++j) {
    const int word = j / 64;
    const uint64_t bit = uint64_t{1} << (j % 64);
    int set = 0;
    for (int i = 0; i < group; ++i) set += (codes[i * kHashWords + word] & bit) != 0;
    const int clear = group - set, extra = set > clear ? set - clear : clear - set;
    p.floor += set < clear ? set : clear;
    p.most += set > clear ? set : clear;
    if (set > clear) p.majority[word] |= bit;
    for (int b = 0; b < kHashPlanesMax; ++b) {
      if (extra >> b & 1) mask[b][word] |= bit;
    }
  }
  for (int b = 0; b < kHashPlanesMax; ++b) {
    uint64_t any = 0;
    for (int w = 0; w < kHashWords; ++w) any |= p.mask[p.count][w] = mask[b][w];
    if (any != 0) p.weight_log[p.count++] = b;
  }
  return p;
}

HEADGATE_HD inline int population(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

// code: [kHashWords]. Inlined always, so that it takes the instruction set of its caller.
HEADGATE_HD inline __attribute__((always_inline)) int hash_distance(const HashPlanes& p, const uint64_t* code) {
  int total = p.floor;
  for (int b = 0; b < p.count; ++b) {
    int bits = 0;
    for (int w = 0; w < kHashWords; ++w) bits += population((code[w] ^ p.majority[w]) & p.mask[b][w]);
    total += bits << p.weight_log[b];
  }
  return total;
}

}  // namespace headgate
