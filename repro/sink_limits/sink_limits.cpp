// What: sinks of +Inf, and of a size that overflows once it is multiplied by log2(e).
// Why: a sink is a logit; kernels in base 2 convert it before the maximum is subtracted.
// Never: puts a bound on what a sink may be.
#include <cmath>

#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

// Softmax in base 2: logits and sink are scaled by log2(e) first, the sink after the maximum.
SparseAnswer base_two(const SparseData& d) {
  SparseAnswer a = plain_attention(d);
  constexpr float log2e = 1.44269504f;
  for (int64_t row = 0; row < d.queries * d.heads; ++row) {
    const float lse = static_cast<float>(a.lse[static_cast<size_t>(row)]) * log2e;
    const float sink = d.sink[static_cast<size_t>(row % d.heads)] * log2e;  // may be +Inf by now
    const float top = std::max(lse, sink);
    const float share = std::exp2(lse - top) / (std::exp2(lse - top) + std::exp2(sink - top));
    for (int64_t c = 0; c < d.value_dim; ++c)
      a.o[static_cast<size_t>(row * d.value_dim + c)] *= static_cast<double>(share);
  }
  a.d_sink.assign(d.sink.size(), NAN);  // exp(sink - Lt) of Inf - Inf
  return a;
}

double worst(const std::vector<double>& values, const std::vector<double>& truth) {
  double largest = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double error = std::abs(values[i] - truth[i]);
    if (!(error <= largest)) largest = error;  // NaN stays
    if (std::isnan(largest)) return largest;
  }
  return largest;
}

void run_all(Report& r) {
  SparseData d = make_sparse(10, 48, 4, 32, 16, 8, 51);
  d.sink = {2.4e38f, INFINITY, -INFINITY, 0.5f};
  const SparseAnswer truth = attend(d, "reference"), bad = base_two(d);
  r.broken("largest error of o, sink scaled by log2(e) first", worst(bad.o, truth.o), 1e-2);
  r.broken("largest error of d_sink", worst(bad.d_sink, truth.d_sink), 1e-2);
  const SparseAnswer good = r.fix_disabled() ? bad : attend(d, "auto");
  r.ours("largest error of o at sinks 2.4e38, +Inf, -Inf, 0.5", worst(good.o, truth.o), 1e-5);
  r.ours("largest error of d_sink", worst(good.d_sink, truth.d_sink), 1e-4);
}

}  // namespace

extern const Reproducer sink_limits{
    "sink_limits", "SA22 SA23", "a sink of +Inf, or one that overflows in base 2, is NaN", run_all};

}  // namespace talea::repro
