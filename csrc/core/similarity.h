// Is the label of a KV head still near its queries? The arithmetic of docs/qsac.md step 3.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace headgate {

// NaN where a norm is zero.
HEADGATE_HD inline double cosine(double query_label, double query_query, double label_label) {
  return query_query > 0 && label_label > 0 ? query_label / std::sqrt(query_query * label_label) : double(NAN);
}

// The weighted harmonic mean of cosines, which means nothing once one of them is not positive.
struct SafeHarmonicMean {
  double weight_sum = 0, inverse_sum = 0, least = double(INFINITY);
  bool finite = true;

  HEADGATE_HD void add(double cosine, double weight) {
    finite = finite && std::isfinite(cosine);
    least = cosine < least ? cosine : least;
    weight_sum += weight;
    inverse_sum += weight / cosine;
  }

  // The least cosine where it is at most `cos_floor`; NaN where one is not finite.
  HEADGATE_HD double value(float cos_floor) const {
    if (!finite) return double(NAN);
    if (least <= cos_floor || !(weight_sum > 0)) return least;
    return weight_sum / inverse_sum;
  }
};

}  // namespace headgate
