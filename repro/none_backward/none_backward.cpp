// What: per-token loss whose backward reads the upstream gradient as one scalar.
// Why: the loss is right and the sum() test passes, so it lived for months in released libraries.
// Never: touches the upstream of our own call other than by its stride.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

// loss [N] is right; the gradient formed in forward is multiplied by upstream[0] for every row.
Answer scalar_upstream(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  a.losses.resize(static_cast<size_t>(d.tokens));
  std::vector<PlainRow> rows;
  for (int64_t t = 0; t < d.tokens; ++t) {
    rows.push_back(softmax_row(&z[t * d.stored], d.vocab));
    const bool valid = d.y[t] != d.options.ignore_index;
    a.losses[t] = valid ? rows[t].lse - z[t * d.stored + d.y[t]] : 0;
  }
  const double upstream = d.upstream.empty() ? 1.0 : d.upstream[0];
  products(d, a, [&](int64_t t, int64_t v) {
    if (d.y[t] == d.options.ignore_index || v >= d.vocab) return 0.0;
    const double p = std::exp(z[t * d.stored + v] - rows[t].lse);
    return upstream * (p - (v == d.y[t] ? 1.0 : 0.0));
  });
  return a;
}

// The usual workaround: reduction mean on the kept tokens, times (kept / all) outside.
Answer scaled_mean(const Data& d, const std::vector<float>& mask) {
  Data kept = d;
  kept.upstream.clear();
  kept.options.reduction = Reduction::mean;
  double weight = 0;
  for (int64_t t = 0; t < d.tokens; ++t) weight += mask[t];
  Answer a = run(kept, "reference");
  for (double& g : a.dx) g *= weight;
  for (double& g : a.dw) g *= weight;
  return a;
}

void run_all(Report& r) {
  Data d = make_data(48, 24, 96, 11);
  d.options.reduction = Reduction::none;
  for (int64_t t = 0; t < d.tokens; t += 5) d.y[t] = d.options.ignore_index;

  // 1. (loss * mask).sum(): the upstream vector is the mask.
  std::vector<float> mask(static_cast<size_t>(d.tokens));
  for (int64_t t = 0; t < d.tokens; ++t)
    mask[t] = d.y[t] == d.options.ignore_index ? 0.f : 0.1f + static_cast<float>(t % 7);
  d.upstream = mask;
  d.upstream[0] = 0.f;  // the first token is ignored: a scalar read zeroes the whole gradient
  const Answer truth = run(d, "reference");
  const Answer bad = scalar_upstream(d);
  r.figure("losses of the broken path, relative L2 to truth (they look right)",
           relative_l2(bad.losses, truth.losses));
  r.broken("dX under a token mask, upstream read as a scalar", relative_l2(bad.dx, truth.dx), 0.1);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return scalar_upstream(d); });
  r.ours("dX under a token mask", relative_l2(good.dx, truth.dx), 1e-5);
  r.ours("dW under a token mask", relative_l2(good.dw, truth.dw), 1e-5);

  // 2. Under sum() the upstream is all ones, and the broken path passes the usual test.
  Data ones = d;
  ones.upstream.assign(static_cast<size_t>(d.tokens), 1.f);
  r.figure("the same broken path under sum(): relative L2 of dX (why tests stay green)",
           relative_l2(scalar_upstream(ones).dx, run(ones, "reference").dx));

  // 3. The scaled-mean workaround: exact for mask == (label != ignore_index), else not.
  Data plain = d;
  plain.upstream.assign(static_cast<size_t>(d.tokens), 0.f);
  for (int64_t t = 0; t < d.tokens; ++t)
    plain.upstream[t] = d.y[t] == d.options.ignore_index ? 0.f : 1.f;
  r.figure("scaled-mean workaround, mask == (label != ignore_index): relative L2 of dX",
           relative_l2(scaled_mean(plain, plain.upstream).dx, run(plain, "reference").dx));
  r.broken("scaled-mean workaround with arbitrary token weights, dX",
           relative_l2(scaled_mean(d, mask).dx, truth.dx), 0.05);

  // 4. Weights known in forward: one pass, the same gradient.
  Data weighted = d;
  weighted.token_weight = d.upstream;
  weighted.upstream.clear();
  weighted.options.reduction = Reduction::sum;
  const Answer once =
      r.fixed([&] { return run(weighted, "auto"); }, [&] { return scalar_upstream(d); });
  r.ours("the same weights as token_weight in one pass, dX", relative_l2(once.dx, truth.dx), 1e-5);
}

}  // namespace

extern const Reproducer none_backward{"none_backward", "B1 B2",
                                      "per-token upstream gradient read as one scalar", run_all};

}  // namespace talea::repro
