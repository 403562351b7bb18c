// What: a query without a single valid key: 0 / 0 forward, NaN into every gradient.
// Why: padding rows and short sequences have such rows in every batch.
// Never: calls a NaN a rounding error.
#include <cmath>

#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

double not_finite(const std::vector<double>& values) {
  double n = 0;
  for (const double v : values) n += std::isfinite(v) ? 0 : 1;
  return n;
}

// Every third query has no key: of fillers alone, or by its length.
SparseData with_empty_rows() {
  SparseData d = make_sparse(12, 40, 4, 32, 16, 8, 41);
  d.topk_length.assign(12, 8);
  for (int64_t s = 0; s < 12; s += 3) {
    if (s % 2 == 0)
      d.topk_length[static_cast<size_t>(s)] = 0;
    else
      for (int64_t k = 0; k < 8; ++k) d.indices[static_cast<size_t>(s * 8 + k)] = -1;
  }
  return d;
}

// exp(s - max) over a row of -Inf, then a division by its sum; length as a filler list.
SparseAnswer naive(SparseData d) {
  for (int64_t s = 0; s < d.queries; ++s)
    for (int64_t k = d.topk_length[static_cast<size_t>(s)]; k < d.slots; ++k)
      d.indices[static_cast<size_t>(s * d.slots + k)] = -1;
  SparseAnswer a = plain_attention(d);
  a.dq.assign(a.o.size(), NAN);  // what 0 / 0 makes of dS
  a.dkv = a.dq;
  return a;
}

double wrong_statistics(const SparseData& d, const SparseAnswer& a) {
  double wrong = 0;
  for (int64_t s = 0; s < d.queries; s += 3)
    for (int64_t h = 0; h < d.heads; ++h) {
      const auto row = static_cast<size_t>(s * d.heads + h);
      if (a.row_max.empty() || a.lse[row] != INFINITY || a.row_max[row] != -INFINITY) ++wrong;
    }
  return wrong;
}

void run_all(Report& r) {
  const SparseData d = with_empty_rows();
  const SparseAnswer truth = attend(d, "reference"), bad = naive(d);
  r.broken("elements of o that are not finite, exp(s - max) / sum", not_finite(bad.o), 0);
  const SparseAnswer good = r.fix_disabled() ? bad : attend(d, "auto");
  r.ours("elements of o that are not finite", not_finite(good.o), 0);
  r.ours("empty rows whose lse is not +Inf or row_max not -Inf", wrong_statistics(d, good), 0);
  r.ours("o", relative_l2(good.o, truth.o), 1e-5);
  r.ours("elements of dq that are not finite", not_finite(good.dq), 0);
  r.ours("elements of dkv that are not finite", not_finite(good.dkv), 0);
}

}  // namespace

extern const Reproducer empty_rows{"empty_rows", "SA4",
                                   "a query without a valid key divides 0 by 0", run_all};

}  // namespace talea::repro
