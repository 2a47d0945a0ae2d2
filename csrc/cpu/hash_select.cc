// Counting select on summed Hamming distances: one pass for the distances and their histogram, one to collect.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
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

constexpr size_t kAheadWords = 256;  // 2 KiB

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
      __builtin_prefetch(codes + (i + 2 * j) * kHashWords + kAheadWords);
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

// Only packs that straddle the limits pay for the look at the map. `outside`: the distance of what may not be selected.
void exclude(const PackCodes& pack, int32_t low, int32_t high, uint16_t outside, uint16_t* out) {
  const int32_t last = pack.first + static_cast<int32_t>(pack.count);
  if (pack.first >= low && last <= high) return;
  for (size_t i = 0; i < pack.count; ++i) {
    const int32_t token = pack.first + pack.map[i];
    if (token < low || token >= high) out[i] = outside;
  }
}

// counts[d]: how many distances are d. Four tables, since equal distances in a row would wait for each other's
// increment.
void count_distances(const uint16_t* distance, size_t n, size_t buckets, std::vector<uint32_t>& counts) {
  counts.assign(4 * buckets, 0);
  uint32_t *a = counts.data(), *b = a + buckets, *c = b + buckets, *d = c + buckets;
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    uint64_t four;
    std::memcpy(&four, distance + i, sizeof four);
    ++a[four & 0xffff], ++b[four >> 16 & 0xffff], ++c[four >> 32 & 0xffff], ++d[four >> 48];
  }
  for (; i < n; ++i) ++a[distance[i]];
  for (size_t at = 0; at < buckets; ++at) a[at] += b[at] + c[at] + d[at];
  counts.resize(buckets);
}

// Bit i: distance[i] <= bound, for 32 distances.
__attribute__((always_inline)) inline uint32_t not_above_baseline(const uint16_t* distance, uint16_t bound) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= uint32_t(distance[i] <= bound) << i;
  return bits;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline uint32_t not_above_avx2(const uint16_t* distance, uint16_t bound) {
  const __m256i l = _mm256_set1_epi16(static_cast<int16_t>(bound));
  const auto* at = reinterpret_cast<const __m256i*>(distance);
  const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
  const __m256i low = _mm256_cmpeq_epi16(_mm256_min_epu16(a, l), a),
                high = _mm256_cmpeq_epi16(_mm256_min_epu16(b, l), b);
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8)));
}
#endif

// The first `count` of 32 bits.
uint32_t first_bits(size_t count) { return count >= 32 ? ~uint32_t{0} : (uint32_t{1} << count) - 1; }

// Writes first + i for every distance[i] <= bound, ascending; returns the end. Reads whole vectors beyond n, and may
// write one beyond the end.
using Collect = int32_t* (*)(const uint16_t* distance, size_t n, uint16_t bound, int32_t first, int32_t* out);

__attribute__((always_inline)) inline int32_t* write_bits(uint32_t bits, int32_t first, int32_t* out) {
  for (; bits; bits &= bits - 1) *out++ = first + std::countr_zero(bits);
  return out;
}

int32_t* collect_baseline(const uint16_t* distance, size_t n, uint16_t bound, int32_t first, int32_t* out) {
  for (size_t at = 0; at < n; at += 32) {
    const uint32_t bits = not_above_baseline(distance + at, bound) & first_bits(n - at);
    out = write_bits(bits, first + static_cast<int32_t>(at), out);
  }
  return out;
}

#if defined(__x86_64__)
__attribute__((target("avx2")))
int32_t* collect_avx2(const uint16_t* distance, size_t n, uint16_t bound, int32_t first, int32_t* out) {
  for (size_t at = 0; at < n; at += 32) {
    const uint32_t bits = not_above_avx2(distance + at, bound) & first_bits(n - at);
    out = write_bits(bits, first + static_cast<int32_t>(at), out);
  }
  return out;
}

__attribute__((target("avx512f,avx512bw,popcnt"))) int32_t* collect_avx512(const uint16_t* distance, size_t n,
                                                                           uint16_t bound, int32_t first,
                                                                           int32_t* out) {
  const __m512i l = _mm512_set1_epi16(static_cast<int16_t>(bound)), sixteen = _mm512_set1_epi32(16);
  __m512i id = _mm512_add_epi32(_mm512_set1_epi32(first),
                                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (size_t at = 0; at < n; at += 32) {
    const uint32_t bits = _mm512_cmple_epu16_mask(_mm512_loadu_si512(distance + at), l) & first_bits(n - at);
    for (const uint32_t half : {bits & 0xffff, bits >> 16}) {
      _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(half), id));
      out += __builtin_popcount(half);
      id = _mm512_add_epi32(id, sixteen);
    }
  }
  return out;
}
#endif

Collect collect() {
#if defined(__x86_64__)
  if (level() == Level::kAvx512) return collect_avx512;
  if (level() == Level::kAvx2) return collect_avx2;
#endif
  return collect_baseline;
}

constexpr size_t kCollectedMore = 16;  // ids that `collect` may write beyond its end

// Everything nearer than `distance` is taken, and of what lies at it `ties`.
struct Threshold {
  uint16_t distance;
  size_t ties;
};

Threshold threshold(const std::vector<uint32_t>& counts, size_t k) {
  size_t below = 0, limit = 0;
  const size_t end = counts.size() - 1;  // the last one may not be selected
  while (limit < end && below + counts[limit] <= k) below += counts[limit++];
  return {static_cast<uint16_t>(limit), limit < end ? k - below : 0};
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
  size_t chosen_count;
};

// Of the tied ids in [begin, end) the `ties` of the lowest tokens stay; returns the new end and what is left of `ties`.
int32_t* settle_ties(const PackCodes& pack, const uint16_t* distance, uint16_t limit, std::vector<uint16_t>& tokens,
                     int32_t* begin, int32_t* end, size_t& ties) {
  const auto tied = [&](int32_t id) { return distance[id - pack.first] == limit; };
  tokens.clear();
  for (const int32_t* id = begin; id != end; ++id) {
    if (tied(*id)) tokens.push_back(pack.map[*id - pack.first]);
  }
  if (tokens.size() <= ties) {
    ties -= tokens.size();
    return end;
  }
  std::nth_element(tokens.begin(), tokens.begin() + ties, tokens.end());
  const uint16_t tied_below = tokens[ties];
  ties = 0;
  return std::remove_if(begin, end, [&](int32_t id) { return tied(id) && pack.map[id - pack.first] >= tied_below; });
}

// Records, ties to the lower token: packs come in the order of their tokens, and a tie is settled within one pack.
int32_t* collect_records(Part& part, uint16_t limit, int32_t* out) {
  const uint16_t* distance = part.distance;
  size_t ties = part.ties;
  for (size_t p = 0; p < part.pack_count; distance += part.packs[p++].count) {
    const PackCodes& pack = part.packs[p];
    if (ties == 0 && limit == 0) break;
    int32_t* end = collect()(distance, pack.count, ties ? limit : limit - 1, pack.first, out);
    out = ties ? settle_ties(pack, distance, limit, part.tokens, out, end, ties) : end;
  }
  return out;
}

// Units, ties to the lower id.
int32_t* collect_units(Part& part, uint16_t limit, int unit, int32_t* out) {
  const int32_t first = part.packs[0].first / unit;
  int32_t* end = collect()(part.distance, part.count, limit, first, out);
  size_t ties = part.ties;
  return std::remove_if(out, end, [&](int32_t id) {
    if (part.distance[id - first] != limit) return false;
    return ties ? (--ties, false) : true;
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
  std::vector<uint32_t> counts;  // of all parts
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
  const auto outside = static_cast<uint16_t>(planes.most + 1);
  uint16_t* distance = part.distance;
  for (size_t p = 0; p < part.pack_count; distance += part.packs[p++].count) {
    measure(planes, part.packs[p].codes, part.packs[p].count, distance);
    exclude(part.packs[p], wanted.low, wanted.high, outside, distance);
  }
  if (wanted.unit > 1) part.count = reduce_units(part.distance, part.count, wanted.unit);
  count_distances(part.distance, part.count, size_t{outside} + 1, part.counts);
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
  s.counts = s.parts[0].counts;
  for (size_t i = 1; i < parts; ++i) {
    for (size_t b = 0; b < s.counts.size(); ++b) s.counts[b] += s.parts[i].counts[b];
  }
  const Threshold limit = threshold(s.counts, static_cast<size_t>(wanted.k));
  size_t ties = limit.ties;
  for (size_t i = 0; i < parts; ++i) {
    Part& part = s.parts[i];
    part.ties = std::min<size_t>(ties, part.counts[limit.distance]);
    ties -= part.ties;
  }
  each([&](Part& part) {
    const auto most = std::accumulate(part.counts.begin(), part.counts.begin() + limit.distance + 1, size_t{0});
    if (part.chosen.size() < most + kCollectedMore) part.chosen.resize(most + kCollectedMore);
    int32_t* begin = part.chosen.data();
    int32_t* end = wanted.unit == 1 ? collect_records(part, limit.distance, begin)
                                    : collect_units(part, limit.distance, wanted.unit, begin);
    part.chosen_count = end - begin;
  });
  for (size_t i = 0; i < parts; ++i) {
    const Part& part = s.parts[i];
    out.insert(out.end(), part.chosen.begin(), part.chosen.begin() + part.chosen_count);
  }
}

}  // namespace headgate
