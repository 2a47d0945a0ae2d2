#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/query.h"

namespace headgate {
namespace {

constexpr int kLanes = 8;  // independent sums, which the compiler keeps in vectors

struct Products {
  double query_label, query_query, label_label;
};

Products products(const float* query, const float* label, int d) {
  double ql[kLanes] = {}, qq[kLanes] = {}, ll[kLanes] = {};
  int e = 0;
  for (; e + kLanes <= d; e += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const double q = query[e + i], l = label[e + i];
      ql[i] += q * l;
      qq[i] += q * q;
      ll[i] += l * l;
    }
  }
  for (; e < d; ++e) {
    ql[0] += double(query[e]) * label[e];
    qq[0] += double(query[e]) * query[e];
    ll[0] += double(label[e]) * label[e];
  }
  Products sum{};
  for (int i = 0; i < kLanes; ++i) sum.query_label += ql[i], sum.query_query += qq[i], sum.label_label += ll[i];
  return sum;
}

}  // namespace

float similarity(const float* query, const float* label, const float* weights, int group, int d, float cos_floor) {
  double weight_sum = 0, inverse_sum = 0, least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < group; ++i) {
    const Products p = products(query + size_t(i) * d, label + size_t(i) * d, d);
    if (!(p.query_query > 0 && p.label_label > 0)) return std::numeric_limits<float>::quiet_NaN();
    const double cosine = p.query_label / std::sqrt(p.query_query * p.label_label);
    if (!std::isfinite(cosine)) return std::numeric_limits<float>::quiet_NaN();
    least = std::min(least, cosine);
    weight_sum += weights[i];
    inverse_sum += weights[i] / cosine;
  }
  // A harmonic mean means nothing once a cosine is not positive.
  if (least <= cos_floor || !(weight_sum > 0)) return static_cast<float>(least);
  return static_cast<float>(weight_sum / inverse_sum);
}

}  // namespace headgate
