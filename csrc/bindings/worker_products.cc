#include "bindings/worker_products.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "cpu/products.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headgate;

namespace {

using Weights = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument("products: " + message);
}

WeightType weight_type(nb::dlpack::dtype dtype) {
  if (dtype == nb::dtype<float>()) return WeightType::kFloat32;
  if (dtype == nb::dtype<int8_t>()) return WeightType::kInt8;
  require(dtype.code == uint8_t(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16 && dtype.lanes == 1,
          "weights must be float32, bfloat16 or int8");
  return WeightType::kBfloat16;
}

// A matrix and what keeps its memory alive.
struct BoundMatrix {
  Weights weights;
  std::optional<Vector> scales, bias;

  BoundMatrix(Weights w, std::optional<Vector> s, std::optional<Vector> b) : weights(w), scales(s), bias(b) {
    require((type() == WeightType::kInt8) == scales.has_value(), "int8 weights have scales, others none");
    require(!scales || scales->shape(0) == w.shape(0), "one scale per output");
    require(!bias || bias->shape(0) == w.shape(0), "one bias per output");
  }
  WeightType type() const { return weight_type(weights.dtype()); }
  Matrix view(size_t out, size_t in) const {
    require(weights.shape(0) == out && weights.shape(1) == in,
            "a matrix must be [" + std::to_string(out) + ", " + std::to_string(in) + "]");
    return {weights.data(), type(), scales ? scales->data() : nullptr, bias ? bias->data() : nullptr,
            int(out),       int(in)};
  }
};

const float* vector(const std::optional<Vector>& v, size_t size) {
  require(!v || v->shape(0) == size, "a norm must have " + std::to_string(size) + " weights");
  return v ? v->data() : nullptr;
}

struct BoundLayer {
  Vector attention_norm;
  BoundMatrix qkv;
  std::optional<Vector> q_norm, k_norm;
  BoundMatrix output;
  Vector mlp_norm;
  BoundMatrix gate_up, down;
};

struct Shape {
  size_t batch, q_heads, kv_heads, head_dim, hidden, vocab;
};

LayerWeights view(const BoundLayer& layer, const Shape& s, size_t ffn) {
  return {vector(layer.attention_norm, s.hidden),
          layer.qkv.view((s.q_heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
          vector(layer.q_norm, s.head_dim),
          vector(layer.k_norm, s.head_dim),
          layer.output.view(s.hidden, s.q_heads * s.head_dim),
          vector(layer.mlp_norm, s.hidden),
          layer.gate_up.view(2 * ffn, s.hidden),
          layer.down.view(s.hidden, ffn)};
}

// The arrays of one step and the kernel over them; every call releases the GIL.
class BoundProducts {
 public:
  BoundProducts(BoundMatrix embedding, std::vector<BoundLayer> layers, Vector final_norm, BoundMatrix head, Ids tokens,
                Ids positions, Heads query, Heads next_query, Heads key, Heads value, Heads attention, Rows logits,
                Vector frequencies, float rotation_factor, float norm_eps, int64_t positions_max, int threads)
      : embedding_(embedding),
        layers_(layers),
        final_norm_(final_norm),
        head_(head),
        ids_{tokens, positions},
        heads_{query, next_query, key, value, attention},
        logits_(logits),
        batch_(tokens.shape(0)),
        products_(weights(frequencies, rotation_factor, norm_eps, positions_max), activations(), int(batch_), threads) {
    require(threads >= 1, "threads must be at least 1");
  }

  void embed(int rows) {
    check_rows(rows);
    nb::gil_scoped_release release;
    products_.embed(rows);
  }
  void layer(int layer, int rows, bool speculate) {
    check_rows(rows);
    require(layer >= 0 && size_t(layer) < layers_.size(), "there is no layer " + std::to_string(layer));
    nb::gil_scoped_release release;
    products_.layer(layer, rows, speculate);
  }
  void peek(int layer, int rows) {
    check_rows(rows);
    require(layer >= 0 && size_t(layer) < layers_.size(), "there is no layer " + std::to_string(layer));
    nb::gil_scoped_release release;
    products_.peek(layer, rows);
  }
  void finish(int rows) {
    check_rows(rows);
    nb::gil_scoped_release release;
    products_.finish(rows);
  }

 private:
  void check_rows(int rows) const {
    require(rows >= 1 && size_t(rows) <= batch_,
            std::to_string(rows) + " rows, but there is room for 1 to " + std::to_string(batch_));
  }

  Shape shape() const {
    const Heads &query = heads_[0], &key = heads_[2];
    return {batch_, query.shape(1), key.shape(1), query.shape(2), embedding_.weights.shape(1), logits_.shape(1)};
  }

  ModelWeights weights(const Vector& frequencies, float rotation_factor, float norm_eps, int64_t positions) const {
    const Shape s = shape();
    require(!layers_.empty(), "a model has at least one layer");
    require(embedding_.type() != WeightType::kInt8, "the embedding must be float32 or bfloat16");
    require(2 * frequencies.size() <= s.head_dim, "more pairs are rotated than a head has");
    ModelWeights w{.embedding = embedding_.view(s.vocab, s.hidden),
                   .final_norm = vector(final_norm_, s.hidden),
                   .head = head_.view(s.vocab, s.hidden),
                   .q_heads = int(s.q_heads),
                   .kv_heads = int(s.kv_heads),
                   .head_dim = int(s.head_dim),
                   .norm_eps = norm_eps,
                   .frequencies = {frequencies.data(), frequencies.data() + frequencies.size()},
                   .rotation_factor = rotation_factor,
                   .positions = positions};
    const size_t ffn = layers_[0].down.weights.shape(1);
    for (const BoundLayer& layer : layers_) w.layers.push_back(view(layer, s, ffn));
    return w;
  }

  Activations activations() const {
    const Shape s = shape();
    for (int i : {0, 1, 4}) require_heads(heads_[i], s.q_heads);
    for (int i : {2, 3}) require_heads(heads_[i], s.kv_heads);
    require(ids_[1].shape(0) == s.batch && logits_.shape(0) == s.batch, "all arrays must have the same batch");
    return {ids_[0].data(),   ids_[1].data(),   heads_[4].data(), heads_[0].data(),
            heads_[1].data(), heads_[2].data(), heads_[3].data(), logits_.data()};
  }

  void require_heads(const Heads& x, size_t heads) const {
    require(x.shape(0) == batch_ && x.shape(1) == heads && x.shape(2) == heads_[0].shape(2),
            "query, next_query and attention must be [batch, q_heads, d], key and value [batch, kv_heads, d]");
  }

  BoundMatrix embedding_;
  std::vector<BoundLayer> layers_;
  Vector final_norm_;
  BoundMatrix head_;
  Ids ids_[2];
  Heads heads_[5];
  Rows logits_;
  size_t batch_;
  Products products_;
};

}  // namespace

void bind_products(nb::module_& m) {
  nb::class_<BoundMatrix>(m, "Matrix")
      .def(nb::init<Weights, std::optional<Vector>, std::optional<Vector>>(), "weights"_a,
           "scales"_a.none() = nb::none(), "bias"_a.none() = nb::none());
  nb::class_<BoundLayer>(m, "ProductsLayer")
      .def(
          "__init__",
          [](BoundLayer* self, Vector attention_norm, const BoundMatrix& qkv, std::optional<Vector> q_norm,
             std::optional<Vector> k_norm, const BoundMatrix& output, Vector mlp_norm, const BoundMatrix& gate_up,
             const BoundMatrix& down) {
            new (self) BoundLayer{attention_norm, qkv, q_norm, k_norm, output, mlp_norm, gate_up, down};
          },
          nb::kw_only(), "attention_norm"_a, "qkv"_a, "q_norm"_a.none(), "k_norm"_a.none(), "output"_a, "mlp_norm"_a,
          "gate_up"_a, "down"_a);
  nb::class_<BoundProducts>(m, "Products")
      .def(nb::init<BoundMatrix, std::vector<BoundLayer>, Vector, BoundMatrix, Ids, Ids, Heads, Heads, Heads, Heads,
                    Heads, Rows, Vector, float, float, int64_t, int>(),
           nb::kw_only(), "embedding"_a, "layers"_a, "final_norm"_a, "head"_a, "tokens"_a.noconvert(),
           "positions"_a.noconvert(), "query"_a.noconvert(), "next_query"_a.noconvert(), "key"_a.noconvert(),
           "value"_a.noconvert(), "attention"_a.noconvert(), "logits"_a.noconvert(), "frequencies"_a,
           "rotation_factor"_a, "norm_eps"_a, "positions_max"_a, "threads"_a)
      .def("embed", &BoundProducts::embed, "rows"_a)
      .def("layer", &BoundProducts::layer, "layer"_a, "rows"_a, "speculate"_a)
      .def("peek", &BoundProducts::peek, "layer"_a, "rows"_a)
      .def("finish", &BoundProducts::finish, "rows"_a);
}
