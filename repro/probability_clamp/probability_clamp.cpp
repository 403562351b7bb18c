// What: -log(p + eps) instead of -log p.
// Why: it avoids log(0) and caps the loss; rows far from their target lose their gradient.
// Never: clamps in our call; the loss comes from the log-sum-exp.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

constexpr double clamp = 1e-8;

Answer clamped(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  std::vector<PlainRow> rows;
  std::vector<double> share;  // p_y / (p_y + eps): what is left of the row's gradient
  for (int64_t t = 0; t < d.tokens; ++t) {
    rows.push_back(softmax_row(&z[t * d.stored], d.vocab));
    const double p = std::exp(z[t * d.stored + d.y[t]] - rows[t].lse);
    a.loss -= std::log(p + clamp) / static_cast<double>(d.tokens);
    share.push_back(p / (p + clamp));
  }
  products(d, a, [&](int64_t t, int64_t v) {
    const double p = std::exp(z[t * d.stored + v] - rows[t].lse);
    return share[t] * (p - (v == d.y[t] ? 1.0 : 0.0)) / static_cast<double>(d.tokens);
  });
  return a;
}

void run_all(Report& r) {
  Data d = make_data(16, 16, 128, 131, 1.0);
  d.bias.assign(static_cast<size_t>(d.stored), 0.f);
  for (int64_t t = 0; t < d.tokens; t += 2) d.bias[d.y[t]] = -40.f;  // targets 40 nats below
  const Answer truth = run(d, "reference");
  const Answer bad = clamped(d);
  r.figure("true loss", truth.loss);
  r.figure("loss with the clamp (at most 18.4 a row)", bad.loss);
  r.broken("loss with targets 40 nats down, clamp 1e-8", relative(bad.loss, truth.loss), 0.2);
  r.broken("dX with targets 40 nats down, clamp 1e-8", relative_l2(bad.dx, truth.dx), 0.3);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return clamped(d); });
  r.ours("loss", relative(good.loss, truth.loss), 1e-6);
  r.ours("dX", relative_l2(good.dx, truth.dx), 1e-5);
}

}  // namespace

extern const Reproducer probability_clamp{"probability_clamp", "B22",
                                          "-log(p + eps) instead of -log p", run_all};

}  // namespace talea::repro
