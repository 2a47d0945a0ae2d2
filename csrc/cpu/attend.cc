#include "cpu/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/attend_lane.h"
#include "cpu/level.h"
#include "cpu/pool.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function that is not inlined

namespace headgate {
namespace {

namespace baseline {
#define HEADGATE_TARGET
constexpr int kWidth = 4;
constexpr int kPairs = 1;  // pairs of vectors that the accumulators of one pass hold
#include "cpu/attend_kernel.inc"
#undef HEADGATE_TARGET
}  // namespace baseline

#if defined(__x86_64__)
namespace avx2 {
#define HEADGATE_TARGET __attribute__((target("avx2,fma")))
constexpr int kWidth = 8;
constexpr int kPairs = 1;
#include "cpu/attend_kernel.inc"
#undef HEADGATE_TARGET
}  // namespace avx2

namespace avx512 {
#define HEADGATE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
constexpr int kWidth = 16;
constexpr int kPairs = 2;
#include "cpu/attend_kernel.inc"
#undef HEADGATE_TARGET
}  // namespace avx512
#endif

const AttendKernel& kernel_for(int d) {
#if defined(__x86_64__)
  if (level() == Level::kAvx512 && d % 32 == 0) return avx512::kernel;
  if (level() >= Level::kAvx2) return avx2::kernel;
#endif
  return baseline::kernel;
}

// Where the kernel keeps element e of a head: a pair of bfloat16 vectors holds even elements, then odd ones.
std::vector<int> element_places(const AttendArgs& a, int width) {
  std::vector<int> at(a.d);
  for (int e = 0; e < a.d; ++e) {
    const int within = e % (2 * width);
    at[e] = a.dtype == Dtype::kFloat32 ? e : e - within + within / 2 + (within % 2) * width;
  }
  return at;
}

// The lane's query as [tile of heads][chunk of 2 * width][head of the tile][element].
void arrange(const AttendArgs& a, int width, const std::vector<int>& at, const float* query, float* out) {
  const int chunk = 2 * width;
  for (int first = 0, tile; first < a.group; first += tile) {
    tile = tile_heads(a.group - first);
    for (int h = 0; h < tile; ++h) {
      const float* from = query + (first + h) * a.d;
      float* to = out + first * a.d + h * chunk;
      for (int c = 0; c < a.d; c += chunk, to += tile * chunk) {
        for (int e = c; e < c + chunk; ++e) to[at[e] - c] = from[e];
      }
    }
  }
}

// Joins the partial results of one lane and brings the elements back into their order.
void merge(const AttendArgs& a, const std::vector<int>& at, const Partial* parts, int count, float* out) {
  for (int h = 0; h < a.group; ++h) {
    float top = -std::numeric_limits<float>::infinity(), sum = 0.f;
    for (int i = 0; i < count; ++i) top = std::max(top, parts[i].top[h]);
    float* joined = parts[0].acc + h * a.d;
    for (int i = 0; i < count; ++i) {
      const float factor = parts[i].sum[h] != 0.f ? std::exp2(parts[i].top[h] - top) : 0.f;
      sum += parts[i].sum[h] * factor;
      const float* acc = parts[i].acc + h * a.d;
      for (int e = 0; e < a.d; ++e) joined[e] = i == 0 ? acc[e] * factor : joined[e] + acc[e] * factor;
    }
    for (int e = 0; e < a.d; ++e) out[h * a.d + e] = sum != 0.f ? joined[at[e]] / sum : 0.f;
  }
}

size_t records_of(const AttendArgs& a, int lane) {
  size_t total = a.counts[lane];
  for (int r = 0; r < a.range_count; ++r) total += a.ranges[(size_t(lane) * a.range_count + r) * 2 + 1];
  return total;
}

constexpr size_t kPartRecordsMin = 512;
constexpr int kPartsPerThread = 4;  // an uneven load evens out

struct Task {
  int lane;
  size_t from, to;
};

// Lanes in order, each as one or more parts of similar size.
std::vector<Task> split(const AttendArgs& a) {
  const int lanes = a.batch * a.heads;
  const size_t wanted = a.threads > 1 ? (size_t(a.threads) * kPartsPerThread + lanes - 1) / lanes : 1;
  std::vector<Task> tasks;
  for (int lane = 0; lane < lanes; ++lane) {
    const size_t total = records_of(a, lane);
    const size_t parts = std::max<size_t>(1, std::min(wanted, total / kPartRecordsMin));
    for (size_t i = 0; i < parts; ++i) tasks.push_back({lane, total * i / parts, total * (i + 1) / parts});
  }
  return tasks;
}

}  // namespace

void attend(const AttendArgs& a) {
  const AttendKernel& kernel = kernel_for(a.d);
  const AttendPart part = a.dtype == Dtype::kFloat32 ? kernel.float32 : kernel.bfloat16;
  const int lanes = a.batch * a.heads;
  const size_t lane_floats = size_t(a.group) * a.d;
  const std::vector<int> at = element_places(a, kernel.width);
  const std::vector<Task> tasks = split(a);
  // Arranged queries, then each task's accumulators, tops and sums.
  std::vector<float> scratch(lanes * lane_floats + tasks.size() * (lane_floats + 2 * a.group));
  std::vector<Partial> partials;
  float* free = scratch.data() + lanes * lane_floats;
  for (size_t i = 0; i < tasks.size(); ++i, free += lane_floats + 2 * a.group) {
    partials.push_back({free, free + lane_floats, free + lane_floats + a.group});
  }
  for (int lane = 0; lane < lanes; ++lane) {
    arrange(a, kernel.width, at, a.query + lane * lane_floats, scratch.data() + lane * lane_floats);
  }
  run_tasks(static_cast<int>(tasks.size()), a.threads, [&](int i) {
    const Task& t = tasks[i];
    part(a, t.lane, t.from, t.to, scratch.data() + t.lane * lane_floats, partials[i]);
  });
  for (size_t i = 0, end; i < tasks.size(); i = end) {
    for (end = i; end < tasks.size() && tasks[end].lane == tasks[i].lane;) ++end;
    merge(a, at, &partials[i], static_cast<int>(end - i), a.out + tasks[i].lane * lane_floats);
  }
}

}  // namespace headgate
