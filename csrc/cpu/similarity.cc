#include "core/similarity.h"

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

double similarity(const float* query, const float* label, const float* weights, int group, int d, float cos_floor) {
  SafeHarmonicMean mean;
  for (int i = 0; i < group; ++i) {
    const Products p = products(query + size_t(i) * d, label + size_t(i) * d, d);
    mean.add(cosine(p.query_label, p.query_query, p.label_label), weights[i]);
  }
  return mean.value(cos_floor);
}

}  // namespace headgate
