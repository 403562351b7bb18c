// What: p - 1 of the target formed by subtraction from a probability rounded to bf16.
// Why: a confident token then has no gradient at all, or twice its gradient.
// Never: rounds anything in our own call.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

// Rows whose target has probability p: logit of the target raised by log(p / (1 - p)) over a flat
// rest.
Data confident(double p) {
  Data d = make_data(16, 64, 512, 5, 0.0);
  std::fill(d.x.begin(), d.x.end(), 0.f);
  // One hidden unit a row selects its target; the rest of W is small noise through unit 63.
  Data noise = make_data(16, 64, 512, 6, 1.0);
  for (int64_t v = 0; v < d.vocab; ++v)
    for (int64_t i = 16; i < 64; ++i) d.w[v * 64 + i] = noise.w[v * 64 + i] * 0.05f;
  for (int64_t t = 0; t < d.tokens; ++t) {
    d.y[t] = 7 + 31 * t;
    d.w[d.y[t] * 64 + t] = 1.f;
    d.x[t * 64 + t] = static_cast<float>(std::log(p / (1 - p)) + std::log(511.0));
    for (int64_t i = 16; i < 64; ++i) d.x[t * 64 + i] = noise.x[t * 64 + i] * 0.1f;
  }
  return d;
}

Answer subtracted(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  products(d, a, [&](int64_t t, int64_t v) {
    const PlainRow row = softmax_row(&z[t * d.stored], d.vocab);
    const float p = round_to_bf16(static_cast<float>(std::exp(z[t * d.stored + v] - row.lse)));
    return (p - (v == d.y[t] ? 1.f : 0.f)) / static_cast<double>(d.tokens);
  });
  return a;
}

void run_all(Report& r) {
  for (double p : {0.9, 0.999, 0.9999}) {
    const Data d = confident(p);
    const Answer truth = run(d, "reference");
    const Answer bad = subtracted(d);
    const std::string at = "dX at p = " + std::to_string(p).substr(0, 6);
    if (p < 0.99)
      r.figure(at + ", p - 1 by subtraction in bf16", relative_l2(bad.dx, truth.dx));
    else
      r.broken(at + ", p - 1 by subtraction in bf16", relative_l2(bad.dx, truth.dx), 0.3);
    const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return subtracted(d); });
    r.ours(at + ", complement form", relative_l2(good.dx, truth.dx), 1e-5);
  }
}

}  // namespace

extern const Reproducer confident_tokens{
    "confident_tokens", "B5", "p - 1 by subtraction erases confident gradients", run_all};

}  // namespace talea::repro
