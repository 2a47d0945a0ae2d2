#include "cpu/products.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "cpu/attend_lane.h"
#include "cpu/level.h"
#include "cpu/pool.h"

namespace headgate {
namespace {

constexpr int kArrangedChunk = 64;  // a multiple of every kernel's
constexpr int kTaskOutputsMin = 64;
constexpr int kNearBytes = 16 << 10;
constexpr float kInt8Unit = 1.f / (1 << 24);
constexpr int kTasksPerThread = 4;  // an uneven load evens out
constexpr int kRowsPerThread = 4;   // below, a row's norm costs less than waking a thread

// Outputs [first, last) of rows . matrix, with x arranged for the matrix's weights.
struct Product {
  const Matrix* matrix;
  const float* x;
  size_t x_stride;
  int rows;
  int first;
  int last;
  float* out;  // of the first output
  size_t out_stride;
  bool add;
};

// Indexed by WeightType where the weights decide.
struct ProductKernel {
  void (*multiply[3])(const Product&);
  void (*arrange[3])(const float* x, int n, float* out);
  void (*norm[3])(const float* x, const float* weight, int n, float eps, float* out);
  void (*gate[3])(const float* gate, const float* up, int n, float* out);
  void (*rotate)(float* head, int d, const float* weight, float eps, const float* cos, const float* sin, int half);
};

#define HEADGATE_KERNEL "cpu/product_kernel.inc"
#include "cpu/each_level.inc"

const ProductKernel& kernel() { return kernel_of(level()); }

int arranged(int n) { return (n + kArrangedChunk - 1) / kArrangedChunk * kArrangedChunk; }

// How many outputs a task takes: whole chunks, so that tasks never write to the same one.
int task_outputs(int outputs, int threads) {
  return std::max(kTaskOutputsMin, arranged(outputs / (threads * kTasksPerThread)));
}

float widened(const Matrix& m, size_t i) {
  if (m.type == WeightType::kFloat32) return static_cast<const float*>(m.weights)[i];
  const uint32_t bits = uint32_t(static_cast<const Bf16*>(m.weights)[i].bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

// One head to make: outputs [first, first + head_dim) of a product.
struct Products::Head {
  const Matrix* matrix;
  const float* input;
  int first;
  float* out;
  int heads;  // of a row of `out`
  bool rotated;
  const float* norm;
};

Products::Products(ModelWeights weights, Activations activations, int batch, int threads)
    : w_(std::move(weights)), a_(activations), batch_(batch), threads_(threads), hidden_(w_.embedding.in) {
  const int attention = w_.q_heads * w_.head_dim;
  ffn_ = w_.layers.empty() ? 0 : w_.layers[0].down.in;
  wide_ = arranged(std::max(hidden_, attention));
  ffn_wide_ = arranged(ffn_);
  x_.resize(size_t(batch) * hidden_);
  input_.resize(size_t(batch) * wide_);
  next_input_.resize(size_t(batch) * wide_);
  gate_up_.resize(size_t(batch) * 2 * ffn_);
  inner_.resize(size_t(batch) * ffn_wide_);
  cos_.resize(size_t(batch) * w_.frequencies.size());
  sin_.resize(cos_.size());
}

void Products::embed(int rows) {
  const size_t half = w_.frequencies.size();
  for (int r = 0; r < rows; ++r) {
    const int64_t token = a_.tokens[r], position = a_.positions[r];
    if (token < 0 || token >= w_.embedding.out)
      throw std::out_of_range("token " + std::to_string(token) + " is not in the vocabulary of " +
                              std::to_string(w_.embedding.out));
    if (position < 0 || position >= w_.positions)
      throw std::out_of_range("position " + std::to_string(position) + " is not below the declared maximum of " +
                              std::to_string(w_.positions) + " tokens");
    for (int i = 0; i < hidden_; ++i) x_[size_t(r) * hidden_ + i] = widened(w_.embedding, size_t(token) * hidden_ + i);
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * w_.frequencies[i];
      cos_[r * half + i] = std::cos(angle) * w_.rotation_factor;
      sin_[r * half + i] = std::sin(angle) * w_.rotation_factor;
    }
  }
}

void Products::layer(int layer, int rows, bool speculate) {
  if (layer > 0) end_layer(w_.layers[layer - 1], rows);
  const LayerWeights& own = w_.layers[layer];
  const LayerWeights* next = speculate && layer + 1 < int(w_.layers.size()) ? &own + 1 : nullptr;
  norm_rows(own.attention_norm, own.qkv.type, rows, input_.data());
  if (next) norm_rows(next->attention_norm, next->qkv.type, rows, next_input_.data());
  make_heads(own, next, rows);
}

void Products::peek(int layer, int rows) {
  const LayerWeights& ahead = w_.layers[layer];
  const int d = w_.head_dim, q = w_.q_heads;
  norm_rows(ahead.attention_norm, ahead.qkv.type, rows, next_input_.data());
  run_tasks(q, threads_, [&](int h) {
    make_head({&ahead.qkv, next_input_.data(), h * d, a_.next_query + h * d, q, true, ahead.q_norm}, rows);
  });
}

void Products::finish(int rows) {
  end_layer(w_.layers.back(), rows);
  norm_rows(w_.final_norm, w_.head.type, rows, input_.data());
  multiply(w_.head, input_.data(), rows, a_.logits, w_.head.out, false);
}

void Products::end_layer(const LayerWeights& layer, int rows) {
  const int attention = w_.q_heads * w_.head_dim;
  for (int r = 0; r < rows; ++r) {
    kernel().arrange[int(layer.output.type)](a_.attention + size_t(r) * attention, attention,
                                             input_.data() + size_t(r) * wide_);
  }
  multiply(layer.output, input_.data(), rows, x_.data(), hidden_, true);
  norm_rows(layer.mlp_norm, layer.gate_up.type, rows, input_.data());
  gated(layer.gate_up, layer.down.type, rows);
  multiply(layer.down, inner_.data(), rows, x_.data(), hidden_, true);
}

void Products::norm_rows(const float* weight, WeightType type, int rows, float* out) {
  run_tasks(rows, rows >= kRowsPerThread * threads_ ? threads_ : 1, [&](int r) {
    kernel().norm[int(type)](x_.data() + size_t(r) * hidden_, weight, hidden_, w_.norm_eps, out + size_t(r) * wide_);
  });
}

void Products::multiply(const Matrix& m, const float* x, int rows, float* out, int out_stride, bool add) {
  const size_t x_stride = x == inner_.data() ? ffn_wide_ : wide_;
  const int step = task_outputs(m.out, threads_);
  run_tasks((m.out + step - 1) / step, threads_, [&](int task) {
    const int first = task * step, last = std::min(m.out, first + step);
    kernel().multiply[int(m.type)]({&m, x, x_stride, rows, first, last, out + first, size_t(out_stride), add});
  });
}

void Products::gated(const Matrix& gate_up, WeightType next, int rows) {
  const int step = task_outputs(ffn_, threads_);
  run_tasks((ffn_ + step - 1) / step, threads_, [&](int task) {
    const int first = task * step, last = std::min(ffn_, first + step);
    for (int part : {0, ffn_}) {
      kernel().multiply[int(gate_up.type)]({&gate_up, input_.data(), size_t(wide_), rows, part + first, part + last,
                                            gate_up_.data() + part + first, size_t(2 * ffn_), false});
    }
    for (int r = 0; r < rows; ++r) {
      const float* gate = gate_up_.data() + size_t(r) * 2 * ffn_ + first;
      kernel().gate[int(next)](gate, gate + ffn_, last - first, inner_.data() + size_t(r) * ffn_wide_ + first);
    }
  });
}

void Products::make_heads(const LayerWeights& layer, const LayerWeights* next, int rows) {
  const int d = w_.head_dim, q = w_.q_heads, kv = w_.kv_heads, own = q + 2 * kv;
  run_tasks(own + (next ? q : 0), threads_, [&](int task) {
    const int h = task < own ? task : task - own;
    if (task >= own) {
      make_head({&next->qkv, next_input_.data(), h * d, a_.next_query + h * d, q, true, next->q_norm}, rows);
    } else if (h < q) {
      make_head({&layer.qkv, input_.data(), h * d, a_.query + h * d, q, true, layer.q_norm}, rows);
    } else if (h < q + kv) {
      make_head({&layer.qkv, input_.data(), h * d, a_.key + (h - q) * d, kv, true, layer.k_norm}, rows);
    } else {
      make_head({&layer.qkv, input_.data(), h * d, a_.value + (h - q - kv) * d, kv, false, nullptr}, rows);
    }
  });
}

void Products::make_head(const Head& head, int rows) {
  const int d = w_.head_dim, half = static_cast<int>(w_.frequencies.size());
  const size_t stride = size_t(head.heads) * d;
  kernel().multiply[int(head.matrix->type)](
      {head.matrix, head.input, size_t(wide_), rows, head.first, head.first + d, head.out, stride, false});
  for (int r = 0; head.rotated && r < rows; ++r) {
    kernel().rotate(head.out + r * stride, d, head.norm, w_.norm_eps, cos_.data() + size_t(r) * half,
                    sin_.data() + size_t(r) * half, half);
  }
}

}  // namespace headgate
