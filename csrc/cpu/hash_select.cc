// Counting select on summed Hamming distances: one pass for the distances and their histogram, one to collect.
#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "cpu/level.h"
#include "cpu/pool.h"
#include "cpu/query.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function that is not inlined
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics initialise a vector with itself
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headgate {
namespace {

constexpr uint16_t kOutside = 0xffff;

using Distances = void (*)(const HashPlanes&, const uint64_t* codes, size_t n, uint16_t* out);

__attribute__((always_inline)) inline void distances_by_word(const HashPlanes& p, const uint64_t* codes, size_t n,
                                                             uint16_t* out) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(hash_distance(p, codes + i * kHashWords));
}

void distances_baseline(const HashPlanes& p, const uint64_t* codes, size_t n, uint16_t* out) {
  distances_by_word(p, codes, n, out);
}

#if defined(__x86_64__)
__attribute__((target("avx2,popcnt"))) void distances_popcnt(const HashPlanes& p, const uint64_t* codes, size_t n,
                                                             uint16_t* out) {
  distances_by_word(p, codes, n, out);
}

#define HEADGATE_VPOPCNT __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,popcnt")))

HEADGATE_VPOPCNT inline __attribute__((always_inline)) __m512i twice(const uint64_t* words) {
  return _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
}

// Words of two codes per vector; four vectors fold into the eight sums. kCount planes stay in registers.
template <int kCount>
HEADGATE_VPOPCNT void distances_vpopcnt(const HashPlanes& p, const uint64_t* codes, size_t n, uint16_t* out) {
  const __m512i majority = twice(p.majority);
  __m512i mask[kCount];
  __m128i shift[kCount];
  for (int b = 0; b < kCount; ++b) mask[b] = twice(p.mask[b]), shift[b] = _mm_cvtsi32_si128(p.weight_log[b]);
  const __m512i base = _mm512_set1_epi64(p.floor);
  // The folds leave the sums as records 0 2 1 3 4 6 5 7.
  const __m512i order = _mm512_setr_epi64(0, 2, 1, 3, 4, 6, 5, 7);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m512i v[4];
    for (int j = 0; j < 4; ++j) {
      const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(codes + (i + 2 * j) * kHashWords), majority);
      v[j] = _mm512_sll_epi64(_mm512_popcnt_epi64(_mm512_and_si512(x, mask[0])), shift[0]);
      for (int b = 1; b < kCount; ++b) {
        v[j] = _mm512_add_epi64(v[j], _mm512_sll_epi64(_mm512_popcnt_epi64(_mm512_and_si512(x, mask[b])), shift[b]));
      }
    }
    const __m512i a = _mm512_add_epi64(_mm512_unpacklo_epi64(v[0], v[1]), _mm512_unpackhi_epi64(v[0], v[1]));
    const __m512i b = _mm512_add_epi64(_mm512_unpacklo_epi64(v[2], v[3]), _mm512_unpackhi_epi64(v[2], v[3]));
    // a: [code 0, code 2] over words 0 and 1, the same over words 2 and 3, then codes 1 and 3 likewise.
    const __m512i low = _mm512_shuffle_i64x2(a, b, 0x88), high = _mm512_shuffle_i64x2(a, b, 0xdd);
    const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(low, high), base);
    const __m128i packed = _mm512_cvtepi64_epi16(_mm512_permutexvar_epi64(order, sum));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), packed);
  }
  distances_by_word(p, codes + i * kHashWords, n - i, out + i);
}

Distances vpopcnt_for(int planes) {
  switch (planes) {
    case 1:
      return distances_vpopcnt<1>;
    case 2:
      return distances_vpopcnt<2>;
    case 3:
      return distances_vpopcnt<3>;
    case 4:
      return distances_vpopcnt<4>;
    default:
      return distances_popcnt;
  }
}
#endif

Distances kernel(int planes) {
#if defined(__x86_64__)
  if (level() == Level::kAvx512 && has_vpopcnt()) return vpopcnt_for(planes);
  if (level() >= Level::kAvx2) return distances_popcnt;
#endif
  return distances_baseline;
}

// Only packs that straddle the limits pay for the look at the map.
void exclude(const PackCodes& pack, int32_t low, int32_t high, uint16_t* out) {
  const int32_t last = pack.first + static_cast<int32_t>(pack.count);
  if (pack.first >= low && last <= high) return;
  for (size_t i = 0; i < pack.count; ++i) {
    const int32_t token = pack.first + pack.map[i];
    if (token < low || token >= high) out[i] = kOutside;
  }
}

// Four tables, since equal distances in a row would wait for each other's increment.
void count_distances(const uint16_t* distance, size_t n, int most, std::vector<uint32_t>& counts) {
  const size_t buckets = size_t(most) + 2;  // the last one takes kOutside
  counts.assign(4 * buckets, 0);
  for (size_t i = 0; i < n; ++i) ++counts[(i % 4) * buckets + std::min<size_t>(distance[i], buckets - 1)];
  for (size_t b = 0; b < buckets; ++b) {
    counts[b] += counts[buckets + b] + counts[2 * buckets + b] + counts[3 * buckets + b];
  }
  counts.resize(buckets - 1);
}

// Bit i of (below, equal): distance[i] < / == limit, for 32 records.
struct Masks {
  uint32_t below, equal;
};

Masks compare_baseline(const uint16_t* distance, uint16_t limit) {
  Masks m{0, 0};
  for (int i = 0; i < 32; ++i) {
    m.below |= uint32_t(distance[i] < limit) << i;
    m.equal |= uint32_t(distance[i] == limit) << i;
  }
  return m;
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw"))) Masks compare_avx512(const uint16_t* distance, uint16_t limit) {
  const __m512i d = _mm512_loadu_si512(distance), l = _mm512_set1_epi16(static_cast<int16_t>(limit));
  return {_mm512_cmplt_epu16_mask(d, l), _mm512_cmpeq_epi16_mask(d, l)};
}

__attribute__((target("avx2"))) Masks compare_avx2(const uint16_t* distance, uint16_t limit) {
  const __m256i l = _mm256_set1_epi16(static_cast<int16_t>(limit));
  const auto* at = reinterpret_cast<const __m256i*>(distance);
  const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
  const auto bits = [](__m256i x, __m256i y) __attribute__((target("avx2"))) {
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xd8)));
  };
  const uint32_t equal = bits(_mm256_cmpeq_epi16(a, l), _mm256_cmpeq_epi16(b, l));
  const uint32_t not_above =
      bits(_mm256_cmpeq_epi16(_mm256_min_epu16(a, l), a), _mm256_cmpeq_epi16(_mm256_min_epu16(b, l), b));
  return {not_above & ~equal, equal};
}
#endif

Masks (*compare())(const uint16_t*, uint16_t) {
#if defined(__x86_64__)
  if (level() == Level::kAvx512) return compare_avx512;
  if (level() == Level::kAvx2) return compare_avx2;
#endif
  return compare_baseline;
}

// Everything nearer than `distance` is taken, and of what lies at it what `takes` says.
struct Threshold {
  uint16_t distance;
  size_t ties;
};

Threshold threshold(const std::vector<uint32_t>& counts, size_t k) {
  size_t below = 0, limit = 0;
  while (limit < counts.size() && below + counts[limit] <= k) below += counts[limit++];
  return {static_cast<uint16_t>(limit), limit < counts.size() ? k - below : 0};
}

// Calls take(index, tied) for every element nearer than the limit, or at it, in order.
template <class Take>
void collect(const uint16_t* distance, size_t n, uint16_t limit, Masks (*compare32)(const uint16_t*, uint16_t),
             Take take) {
  for (size_t at = 0; at < n; at += 32) {
    const Masks m = compare32(distance + at, limit);
    uint32_t bits = m.below | m.equal;
    if (n - at < 32) bits &= (uint32_t{1} << (n - at)) - 1;
    for (; bits; bits &= bits - 1) {
      const int bit = std::countr_zero(bits);
      take(at + bit, (m.equal >> bit & 1) != 0);
    }
  }
}

size_t count_equal(const uint16_t* distance, size_t n, uint16_t limit, Masks (*compare32)(const uint16_t*, uint16_t)) {
  size_t count = 0, at = 0;
  for (; at + 32 <= n; at += 32) count += std::popcount(compare32(distance + at, limit).equal);
  return count + std::count(distance + at, distance + n, limit);
}

// The token below which the `ties` lowest of a pack's tied records lie.
int32_t tie_token(const PackCodes& pack, const uint16_t* distance, uint16_t limit, size_t ties,
                  Masks (*compare32)(const uint16_t*, uint16_t), std::vector<uint16_t>& tokens) {
  if (ties == 0) return 0;
  if (count_equal(distance, pack.count, limit, compare32) <= ties) return INT32_MAX;
  tokens.clear();
  for (size_t i = 0; i < pack.count; ++i) {
    if (distance[i] == limit) tokens.push_back(pack.map[i]);
  }
  std::nth_element(tokens.begin(), tokens.begin() + ties, tokens.end());
  return tokens[ties];
}

// Some packs in a row, which one thread looks at. `distance` is of their records, later of their units.
struct Part {
  const PackCodes* packs;
  size_t pack_count;
  uint16_t* distance;
  size_t count;  // of distances
  size_t ties;   // how many at the threshold it may take
  std::vector<uint32_t> counts;
  std::vector<uint16_t> tokens;
  std::vector<int32_t> chosen;
};

// Records, ties to the lower token: packs come in the order of their tokens, and a tie is settled within one pack.
void collect_records(Part& part, uint16_t limit, size_t ties) {
  const auto compare32 = compare();
  const uint16_t* distance = part.distance;
  for (size_t p = 0; p < part.pack_count; distance += part.packs[p++].count) {
    const PackCodes& pack = part.packs[p];
    const int32_t tied_below = tie_token(pack, distance, limit, ties, compare32, part.tokens);
    collect(distance, pack.count, limit, compare32, [&](size_t i, bool tied) {
      if (tied && pack.map[i] >= tied_below) return;
      ties -= tied;
      part.chosen.push_back(pack.first + static_cast<int32_t>(i));
    });
  }
}

// Units, ties to the lower id.
void collect_units(Part& part, uint16_t limit, size_t ties, int unit) {
  const int32_t first = part.packs[0].first / unit;
  collect(part.distance, part.count, limit, compare(), [&](size_t i, bool tied) {
    if (tied && ties == 0) return;
    ties -= tied;
    part.chosen.push_back(first + static_cast<int32_t>(i));
  });
}

// Each unit's least distance, in place; returns how many units there are.
size_t reduce_units(uint16_t* distance, size_t n, int unit) {
  const size_t units = n / unit;
  for (size_t i = 0; i < units; ++i) distance[i] = *std::min_element(distance + i * unit, distance + (i + 1) * unit);
  return units;
}

struct Scratch {
  std::vector<uint16_t> distance;
  std::vector<Part> parts;
};

constexpr size_t kPartRecordsMin = 16384;  // a thread's share below which waking it costs more than it brings

// Cuts packs into parts of about equal size, as many as threads at most.
size_t split(const std::vector<PackCodes>& packs, size_t pack_count, size_t records, int threads, Scratch& s) {
  const size_t wanted = std::clamp<size_t>(records / kPartRecordsMin, 1, threads);
  if (s.parts.size() < wanted) s.parts.resize(wanted);
  s.distance.resize(records + 32);  // comparisons read whole vectors
  size_t count = 0, p = 0, at = 0;
  while (p < pack_count) {
    Part& part = s.parts[count++];
    part.packs = &packs[p];
    part.pack_count = part.count = 0;
    part.distance = s.distance.data() + at;
    while (p < pack_count && (at < records * count / wanted || count == wanted)) {
      part.count += packs[p].count;
      at += packs[p++].count;
      ++part.pack_count;
    }
  }
  return count;
}

void measure_part(const HashPlanes& planes, const Selection& wanted, Part& part) {
  const Distances measure = kernel(planes.count);
  uint16_t* distance = part.distance;
  for (size_t p = 0; p < part.pack_count; distance += part.packs[p++].count) {
    measure(planes, part.packs[p].codes, part.packs[p].count, distance);
    exclude(part.packs[p], wanted.low, wanted.high, distance);
  }
  if (wanted.unit > 1) part.count = reduce_units(part.distance, part.count, wanted.unit);
  count_distances(part.distance, part.count, planes.most, part.counts);
}

}  // namespace

void hash_select(const uint64_t* query_codes, int group, const std::vector<PackCodes>& packs, const Selection& wanted,
                 int threads, std::vector<int32_t>& out) {
  if (group < 1 || group > kHashGroupMax) throw std::invalid_argument("hash_select: 1 to 128 query heads per KV head");
  static thread_local Scratch scratch;
  Scratch& s = scratch;  // pool threads must see the caller's
  const HashPlanes planes = fold_codes(query_codes, group);
  size_t pack_count = 0, records = 0;
  while (pack_count < packs.size() && packs[pack_count].first < wanted.high) records += packs[pack_count++].count;
  out.clear();
  if (records == 0) return;
  const size_t parts = split(packs, pack_count, records, threads, s);
  const auto each = [&](auto task) { run_tasks(static_cast<int>(parts), threads, [&](int i) { task(s.parts[i]); }); };
  each([&](Part& part) { measure_part(planes, wanted, part); });
  for (size_t i = 1; i < parts; ++i) {
    for (size_t b = 0; b < s.parts[0].counts.size(); ++b) s.parts[0].counts[b] += s.parts[i].counts[b];
  }
  const Threshold limit = threshold(s.parts[0].counts, static_cast<size_t>(wanted.k));
  size_t ties = limit.ties;
  for (size_t i = 0; i < parts; ++i) {
    Part& part = s.parts[i];
    part.ties = ties;
    if (i + 1 < parts) ties -= std::min(ties, count_equal(part.distance, part.count, limit.distance, compare()));
  }
  each([&](Part& part) {
    part.chosen.clear();
    if (wanted.unit == 1)
      collect_records(part, limit.distance, part.ties);
    else
      collect_units(part, limit.distance, part.ties, wanted.unit);
  });
  for (size_t i = 0; i < parts; ++i) out.insert(out.end(), s.parts[i].chosen.begin(), s.parts[i].chosen.end());
}

}  // namespace headgate
