// What: two implementations with the same loss, bit for bit, and gradients that differ.
// Why: parity tests compare losses; training follows gradients.
// Never: calls two runs equal on their losses alone.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

// The gradient of each logit passes through bf16 on its way to the products; the loss does not.
Answer rounded_gradient(const Data& d) {
  Answer a = run(d, "reference");
  const auto z = logits_of(d);
  products(d, a, [&](int64_t t, int64_t v) {
    const PlainRow row = softmax_row(&z[t * d.stored], d.vocab);
    const float dz =
        static_cast<float>(std::exp(z[t * d.stored + v] - row.lse)) - (v == d.y[t] ? 1.f : 0.f);
    return round_to_bf16(dz) / static_cast<double>(d.tokens);
  });
  return a;
}

void run_all(Report& r) {
  const Data d = make_data(64, 16, 256, 181, 3.0);
  const Answer truth = run(d, "reference");
  const Answer bad = rounded_gradient(d);
  r.figure("difference of the two losses", bad.loss - truth.loss);
  r.broken("dW while the losses are equal", relative_l2(bad.dw, truth.dw), 1e-4);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return rounded_gradient(d); });
  r.ours("dW", relative_l2(good.dw, truth.dw), 1e-5);
}

}  // namespace

extern const Reproducer losses_only_compared{"losses_only_compared", "B21",
                                             "equal losses, different gradients", run_all};

}  // namespace talea::repro
