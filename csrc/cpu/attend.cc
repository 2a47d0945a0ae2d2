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

namespace headgate {
namespace {

#define HEADGATE_KERNEL "cpu/attend_kernel.inc"
#include "cpu/each_level.inc"

const AttendKernel& kernel_for(int d) {
  return kernel_of(level() == Level::kAvx512 && d % 32 != 0 ? Level::kAvx2 : level());
}

// Where the kernel keeps element e of a head: a pair of bfloat16 vectors holds even elements, then odd ones.
void element_places(const AttendArgs& a, int width, std::vector<int>& at) {
  at.resize(a.d);
  for (int e = 0; e < a.d; ++e) {
    const int within = e % (2 * width);
    at[e] = a.dtype == Dtype::kFloat32 ? e : e - within + within / 2 + (within % 2) * width;
  }
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

constexpr float kLn2 = 0.69314718f;

// Joins the partial results of one lane and brings the elements back into their order.
void merge(const AttendArgs& a, const std::vector<int>& at, const Partial* parts, int count, float* out, float* lse) {
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
    if (lse) lse[h] = sum != 0.f ? (top + std::log2(sum)) * kLn2 : -std::numeric_limits<float>::infinity();
  }
}

constexpr size_t kPartRecords = 1024;

struct Task {
  int lane;
  size_t from, to;
};

// What a call works with. It is kept by its thread: a decode step allocates nothing once it has run.
struct Scratch {
  std::vector<int> at;
  std::vector<Task> tasks;  // lanes in order, each as one or more parts
  std::vector<float> floats;
  std::vector<Partial> partials;
};

void split(const AttendArgs& a, std::vector<Task>& tasks) {
  tasks.clear();
  for (int lane = 0; lane < a.batch * a.heads; ++lane) {
    const size_t total = a.lanes[lane].records();
    size_t from = 0;
    do {
      const size_t to = std::min(total, from + kPartRecords);
      tasks.push_back({lane, from, to});
      from = to;
    } while (from < total);
  }
}

}  // namespace

void attend(const AttendArgs& a) {
  static thread_local Scratch scratch;
  Scratch& s = scratch;  // pool threads must see the caller's
  const AttendKernel& kernel = kernel_for(a.d);
  const AttendPart part = a.dtype == Dtype::kFloat32 ? kernel.float32 : kernel.bfloat16;
  const int lanes = a.batch * a.heads;
  const size_t lane_floats = size_t(a.group) * a.d;
  element_places(a, kernel.width, s.at);
  split(a, s.tasks);
  // Arranged queries, then each task's accumulators, tops and sums.
  s.floats.resize(lanes * lane_floats + s.tasks.size() * (lane_floats + 2 * a.group));
  s.partials.clear();
  float* free = s.floats.data() + lanes * lane_floats;
  for (size_t i = 0; i < s.tasks.size(); ++i, free += lane_floats + 2 * a.group) {
    s.partials.push_back({free, free + lane_floats, free + lane_floats + a.group});
  }
  for (int lane = 0; lane < lanes; ++lane) {
    arrange(a, kernel.width, s.at, a.query + lane * lane_floats, s.floats.data() + lane * lane_floats);
  }
  run_tasks(static_cast<int>(s.tasks.size()), a.threads, [&](int i) {
    const Task& t = s.tasks[i];
    part(a, t.lane, t.from, t.to, s.floats.data() + t.lane * lane_floats, s.partials[i]);
  });
  for (size_t i = 0, end; i < s.tasks.size(); i = end) {
    const int lane = s.tasks[i].lane;
    for (end = i; end < s.tasks.size() && s.tasks[end].lane == lane;) ++end;
    merge(a, s.at, &s.partials[i], static_cast<int>(end - i), a.out + lane * lane_floats,
          a.lse ? a.lse + size_t(lane) * a.group : nullptr);
  }
}

}  // namespace headgate
