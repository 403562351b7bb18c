// What: the plain loss and gradient from materialised logits, with one hook for the broken rule.
// Why: most broken patterns differ from the right one in a single term of dz.
// Never: used by our own path.
#pragma once

#include <algorithm>
#include <cmath>

#include "repro/support/repro.hpp"

namespace talea::repro {

struct PlainRow {
  double max = -INFINITY, sum = 0, lse = 0;
};

// Softmax of one row of logits over `columns` columns.
inline PlainRow softmax_row(const float* z, int64_t columns) {
  PlainRow r;
  for (int64_t v = 0; v < columns; ++v) r.max = std::max<double>(r.max, z[v]);
  for (int64_t v = 0; v < columns; ++v) r.sum += std::exp(z[v] - r.max);
  r.lse = r.max + std::log(r.sum);
  return r;
}

// dx and dw from a function dz(t, v) over the stored columns, in fp64.
template <typename Gradient>
void products(const Data& d, Answer& a, Gradient dz) {
  a.dx.assign(d.x.size(), 0);
  a.dw.assign(d.w.size(), 0);
  for (int64_t t = 0; t < d.tokens; ++t)
    for (int64_t v = 0; v < d.stored; ++v) {
      const double g = dz(t, v);
      if (g == 0) continue;
      for (int64_t i = 0; i < d.hidden; ++i) {
        a.dx[t * d.hidden + i] += g * d.w[v * d.hidden + i];
        a.dw[v * d.hidden + i] += g * d.x[t * d.hidden + i];
      }
    }
}

inline int64_t valid_count(const Data& d) {
  return std::count_if(d.y.begin(), d.y.end(),
                       [&](int64_t y) { return y != d.options.ignore_index; });
}

}  // namespace talea::repro
