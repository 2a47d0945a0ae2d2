#include "cpu/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
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

AttendPart part_of(const AttendKernel& kernel, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return kernel.float32;
    case Dtype::kInt8:
      return kernel.int8;
    case Dtype::kInt4:
      return kernel.int4;
    default:
      return kernel.bfloat16;
  }
}

// Where the kernel keeps element e of a head: a pair of vectors holds even elements, then odd ones, but for dtypes that
// are read in their order.
void element_places(Dtype dtype, int d, int width, std::vector<int>& at) {
  const bool in_order = dtype == Dtype::kFloat32 || dtype == Dtype::kInt8;
  at.resize(d);
  for (int e = 0; e < d; ++e) {
    const int within = e % (2 * width);
    at[e] = in_order ? e : e - within + within / 2 + (within % 2) * width;
  }
}

// Hadamard's matrix over blocks of the largest power of two that divides d: orthonormal, and its own inverse.
void rotate(float* x, int d) {
  const int block = d & -d;
  const float factor = 1.f / std::sqrt(float(block));
  for (int half = 1; half < block; half *= 2) {
    for (int e = 0; e < d; ++e) {
      if (e & half) continue;
      const float a = x[e], b = x[e + half];
      x[e] = a + b, x[e + half] = a - b;
    }
  }
  for (int e = 0; e < d; ++e) x[e] *= factor;
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

constexpr size_t kPartRecords = 1024;

struct Task {
  int lane;
  size_t from, to;
};

// What a call works with. It is kept by its thread: a decode step allocates nothing once it has run.
struct Scratch {
  std::vector<int> at[kRecordKindsMax];
  std::vector<Task> tasks;  // lanes in order, each as one or more parts
  std::vector<float> floats;
  std::vector<float> rotated;
  std::vector<Partial> partials;
};

void split(const AttendArgs& a, std::vector<Task>& tasks) {
  tasks.clear();
  for (int lane = 0; lane < a.batch * a.heads * a.kind_count; ++lane) {
    const size_t total = a.lanes[lane].records();
    size_t from = 0;
    do {
      const size_t to = std::min(total, from + kPartRecords);
      tasks.push_back({lane, from, to});
      from = to;
    } while (from < total);
  }
}

// Adds what a kind's records give to `out`; `joined` is in the kernel's order of its elements.
void add_in_order(const AttendArgs& a, int kind, const std::vector<int>& at, const float* joined,
                  std::vector<float>& scratch, float* out) {
  scratch.resize(a.d);
  for (int e = 0; e < a.d; ++e) scratch[e] = joined[at[e]];
  if (a.kinds[kind].dtype == Dtype::kInt4) rotate(scratch.data(), a.d);
  for (int e = 0; e < a.d; ++e) out[e] = kind == 0 ? scratch[e] : out[e] + scratch[e];
}

// Joins the partial results [first, end) of one head and brings the elements back into their order.
void merge(const AttendArgs& a, Scratch& s, size_t first, size_t end, float* out, float* lse) {
  for (int h = 0; h < a.group; ++h) {
    float top = -std::numeric_limits<float>::infinity(), sum = 0.f;
    for (size_t i = first; i < end; ++i) top = std::max(top, s.partials[i].top[h]);
    for (size_t i = first, after; i < end; i = after) {
      const int lane = s.tasks[i].lane, kind = lane % a.kind_count;
      float* joined = s.partials[i].acc + h * a.d;
      for (after = i; after < end && s.tasks[after].lane == lane; ++after) {
        const Partial& part = s.partials[after];
        const float factor = part.sum[h] != 0.f ? std::exp2(part.top[h] - top) : 0.f;
        sum += part.sum[h] * factor;
        const float* acc = part.acc + h * a.d;
        for (int e = 0; e < a.d; ++e) joined[e] = after == i ? acc[e] * factor : joined[e] + acc[e] * factor;
      }
      add_in_order(a, kind, s.at[kind], joined, s.rotated, out + h * a.d);
    }
    for (int e = 0; e < a.d; ++e) out[h * a.d + e] = sum != 0.f ? out[h * a.d + e] / sum : 0.f;
    if (lse) lse[h] = sum != 0.f ? (top + std::log2(sum)) * kLn2 : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

RecordKind record_kind(int dtype, int d, size_t record_bytes) {
  const RecordKind kind{static_cast<Dtype>(dtype), record_bytes};
  const bool read = kind.dtype == Dtype::kFloat32 || kind.dtype == Dtype::kBfloat16 || kind.dtype == Dtype::kInt8 ||
                    kind.dtype == Dtype::kInt4;
  if (!read) throw std::invalid_argument("dtype must be 1 (float32), 2 (bfloat16), 5 (int8) or 6 (int4)");
  if (2 * size_t(d) * bits_of(kind.dtype) / 8 > record_bytes)
    throw std::invalid_argument("a key and a value do not fit record_bytes");
  return kind;
}

void attend(const AttendArgs& a) {
  static thread_local Scratch scratch;
  Scratch& s = scratch;  // pool threads must see the caller's
  const AttendKernel& kernel = kernel_for(a.d);
  const int heads = a.batch * a.heads, lanes = heads * a.kind_count;
  const size_t lane_floats = size_t(a.group) * a.d;
  for (int kind = 0; kind < a.kind_count; ++kind) element_places(a.kinds[kind].dtype, a.d, kernel.width, s.at[kind]);
  split(a, s.tasks);
  // Arranged queries, then each task's accumulators, tops and sums.
  s.floats.resize(lanes * lane_floats + s.tasks.size() * (lane_floats + 2 * a.group));
  s.partials.clear();
  float* free = s.floats.data() + lanes * lane_floats;
  for (size_t i = 0; i < s.tasks.size(); ++i, free += lane_floats + 2 * a.group) {
    s.partials.push_back({free, free + lane_floats, free + lane_floats + a.group});
  }
  for (int lane = 0; lane < lanes; ++lane) {
    const int kind = lane % a.kind_count;
    const float* query = a.query + lane / a.kind_count * lane_floats;
    if (a.kinds[kind].dtype == Dtype::kInt4) {
      s.rotated.assign(query, query + lane_floats);
      for (int h = 0; h < a.group; ++h) rotate(&s.rotated[size_t(h) * a.d], a.d);
      query = s.rotated.data();
    }
    arrange(a, kernel.width, s.at[kind], query, s.floats.data() + lane * lane_floats);
  }
  run_tasks(static_cast<int>(s.tasks.size()), a.threads, [&](int i) {
    const Task& t = s.tasks[i];
    const RecordKind& kind = a.kinds[t.lane % a.kind_count];
    part_of(kernel, kind.dtype)(a, a.lanes[t.lane], kind.record_bytes, t.from, t.to,
                                s.floats.data() + t.lane * lane_floats, s.partials[i]);
  });
  for (size_t i = 0, end; i < s.tasks.size(); i = end) {
    const int head = s.tasks[i].lane / a.kind_count;
    for (end = i; end < s.tasks.size() && s.tasks[end].lane / a.kind_count == head;) ++end;
    merge(a, s, i, end, a.out + head * lane_floats, a.lse ? a.lse + size_t(head) * a.group : nullptr);
  }
}

}  // namespace headgate
