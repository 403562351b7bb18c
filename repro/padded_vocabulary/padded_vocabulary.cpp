// What: padded vocabulary rows take part in the softmax.
// Why: V is rounded up to a tile or a shard, and the padding's logits of 0 are real probability.
// Never: pads in our own call; `vocab` says where the vocabulary ends.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer padding_counted(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  std::vector<PlainRow> rows;
  for (int64_t t = 0; t < d.tokens; ++t) {
    rows.push_back(softmax_row(&z[t * d.stored], d.stored));
    a.loss += (rows[t].lse - z[t * d.stored + d.y[t]]) / static_cast<double>(d.tokens);
  }
  products(d, a, [&](int64_t t, int64_t v) {
    const double p = std::exp(z[t * d.stored + v] - rows[t].lse);
    return (p - (v == d.y[t] ? 1.0 : 0.0)) / static_cast<double>(d.tokens);
  });
  return a;
}

void run_all(Report& r) {
  // 1,000 entries stored in 1,024 rows. Logits well below 0 make the padding the most likely word.
  Data d = make_data(32, 16, 1000, 21, 1.0, 24);
  d.bias.assign(static_cast<size_t>(d.stored), -20.f);
  std::fill(d.bias.begin() + d.vocab, d.bias.end(), 0.f);
  std::fill(d.w.begin() + d.vocab * d.hidden, d.w.end(), 0.f);
  const Answer truth = run(d, "reference");
  const Answer bad = padding_counted(d);
  r.figure("loss with padding in the softmax minus the true loss, nats", bad.loss - truth.loss);
  r.broken("loss with padding in the softmax", relative(bad.loss, truth.loss), 0.5);
  r.broken("dX with padding in the softmax", relative_l2(bad.dx, truth.dx), 0.1);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return padding_counted(d); });
  r.ours("loss", relative(good.loss, truth.loss), 1e-6);
  r.ours("dX", relative_l2(good.dx, truth.dx), 1e-5);
  double stray = 0;
  for (size_t i = static_cast<size_t>(d.vocab * d.hidden); i < good.dw.size(); ++i)
    stray = std::max(stray, std::abs(good.dw[i]));
  r.ours("largest |dW| of a padded row (exactly 0)", stray, 0.0);
}

}  // namespace

extern const Reproducer padded_vocabulary{"padded_vocabulary", "B7",
                                          "padded columns enter the softmax", run_all};

}  // namespace talea::repro
