// What a decode step computes outside attention and selection, for a few tokens ("rows") at a time: embedding, norms,
// projections, QK norm, rotation, the gated MLP and the head.
//
// Activations are float32. Matrices stay where torch has them, [out, in] by rows, and are read once per four rows. An
// output element is summed by one thread in one order, whatever the number of rows or threads.
#pragma once

#include <cstdint>
#include <vector>

namespace headgate {

enum class WeightType : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Borrowed memory. scales: per output, of int8 weights only. bias: per output, or null.
struct Matrix {
  const void* weights = nullptr;
  WeightType type = WeightType::kFloat32;
  const float* scales = nullptr;
  const float* bias = nullptr;
  int out = 0;
  int in = 0;
};

// qkv: rows of q, then k, then v, by head. gate_up: all rows of gate, then of up. q_norm and k_norm: [head_dim] or
// null.
struct LayerWeights {
  const float* attention_norm;
  Matrix qkv;
  const float* q_norm;
  const float* k_norm;
  Matrix output;
  const float* mlp_norm;
  Matrix gate_up;
  Matrix down;
};

struct ModelWeights {
  Matrix embedding;
  std::vector<LayerWeights> layers;
  const float* final_norm;
  Matrix head;
  int q_heads;
  int kv_heads;
  int head_dim;
  float norm_eps;
  std::vector<float> frequencies;  // radians per position of every rotated pair (i, i + rotary_dim / 2) of a head
  float rotation_factor;           // multiplies cosine and sine
  int64_t positions;               // below which a position must lie
};

// What goes in and out, for `batch` rows each.
struct Activations {
  const int64_t* tokens;
  const int64_t* positions;
  const float* attention;  // [batch][q_heads][head_dim]
  float* query;            // [batch][q_heads][head_dim]
  float* next_query;
  float* key;  // [batch][kv_heads][head_dim]
  float* value;
  float* logits;  // [batch][vocab]
};

// One worker's steps, in the order embed, layer(0), .., layer(last), finish; every call takes the first `rows` rows.
// Not thread-safe; allocates nothing after construction.
class Products {
 public:
  Products(ModelWeights weights, Activations activations, int batch, int threads);

  // tokens -> x, positions -> angles. std::out_of_range for a token or position that the model does not have.
  void embed(int rows);
  // Ends layer - 1 (unless there is none) from `attention`; then this layer's query, key and value from x, and with
  // `speculate` the next layer's query from the same x.
  void layer(int layer, int rows, bool speculate);
  // `layer`'s query from x as it is now, into next_query.
  void peek(int layer, int rows);
  // Ends the last layer from `attention`; x -> logits.
  void finish(int rows);

 private:
  struct Head;

  void end_layer(const LayerWeights& layer, int rows);
  void norm_rows(const float* weight, WeightType type, int rows, float* out);
  void multiply(const Matrix& m, const float* x, int rows, float* out, int out_stride, bool add);
  void gated(const Matrix& gate_up, WeightType next, int rows);
  void make_heads(const LayerWeights& layer, const LayerWeights* next, int rows);
  void make_head(const Head& head, int rows);

  ModelWeights w_;
  Activations a_;
  int batch_;
  int threads_;
  int hidden_;
  int wide_;  // floats of an arranged row of hidden or attention
  int ffn_;
  int ffn_wide_;
  std::vector<float> x_;      // [batch][hidden]
  std::vector<float> input_;  // [batch][wide], arranged for the product that reads it
  std::vector<float> next_input_;
  std::vector<float> gate_up_;    // [batch][2 * ffn]
  std::vector<float> inner_;      // [batch][ffn_wide], arranged
  std::vector<float> cos_, sin_;  // [batch][rotary_dim / 2]
};

}  // namespace headgate
