// What: dX summed over vocabulary splits (or ranks) in bf16.
// Why: each split's part is rounded before the sum, and parts of opposite sign cancel.
// Never: sums parts of our dX below fp32.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer summed_in_bf16(const Data& d, int64_t splits) {
  Answer a;
  a.dx.assign(d.x.size(), 0);
  const auto z = logits_of(d);
  const int64_t width = d.vocab / splits;
  for (int64_t t = 0; t < d.tokens; ++t) {
    const PlainRow row = softmax_row(&z[t * d.stored], d.vocab);
    for (int64_t s = 0; s < splits; ++s)
      for (int64_t i = 0; i < d.hidden; ++i) {
        float part = 0;
        for (int64_t v = s * width; v < (s + 1) * width; ++v) {
          const double p = std::exp(z[t * d.stored + v] - row.lse);
          const double dz = (p - (v == d.y[t] ? 1.0 : 0.0)) / static_cast<double>(d.tokens);
          part += static_cast<float>(dz) * d.w[v * d.hidden + i];
        }
        double& sum = a.dx[t * d.hidden + i];
        sum = round_to_bf16(static_cast<float>(sum) + round_to_bf16(part));
      }
  }
  return a;
}

void run_all(Report& r) {
  // Embeddings that share a common direction: the parts of dX are large and cancel.
  Data d = make_data(16, 32, 512, 101, 1.0);
  for (int64_t v = 0; v < d.vocab; ++v)
    for (int64_t i = 0; i < d.hidden; ++i) d.w[v * d.hidden + i] += 2.f;
  const Answer truth = run(d, "reference");
  const Answer bad = summed_in_bf16(d, 16);
  r.broken("dX summed over 16 splits in bf16", relative_l2(bad.dx, truth.dx), 0.01);
  const Answer good =
      r.fixed([&] { return run(d, "auto"); }, [&] { return summed_in_bf16(d, 16); });
  r.ours("dX summed in fp32", relative_l2(good.dx, truth.dx), 1e-4);
}

}  // namespace

extern const Reproducer dx_split_16bit{"dx_split_16bit", "B14",
                                       "dX summed over vocabulary splits in bf16", run_all};

}  // namespace talea::repro
