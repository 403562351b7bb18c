// What: an online softmax whose running maximum starts at 0 instead of minus infinity.
// Why: a row whose logits all lie below -88 underflows in fp32: log of 0.
// Never: starts our own maximum anywhere but at minus infinity.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer max_from_zero(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  for (int64_t t = 0; t < d.tokens; ++t) {
    float max = 0.f, sum = 0.f;  // the bug
    for (int64_t v = 0; v < d.vocab; ++v) {
      const float next = std::max(max, z[t * d.stored + v]);
      sum = sum * std::exp(max - next) + std::exp(z[t * d.stored + v] - next);
      max = next;
    }
    a.loss += (max + std::log(sum) - z[t * d.stored + d.y[t]]) / static_cast<double>(d.tokens);
  }
  return a;
}

void run_all(Report& r) {
  Data d = make_data(16, 16, 256, 61, 1.0);
  d.bias.assign(static_cast<size_t>(d.stored), -120.f);
  const Answer truth = run(d, "reference");
  const Answer bad = max_from_zero(d);
  r.figure("loss with the maximum from 0", bad.loss);
  r.broken("loss of rows below -100, maximum from 0", relative(bad.loss, truth.loss), 0.1);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return max_from_zero(d); });
  r.ours("loss of rows below -100", relative(good.loss, truth.loss), 1e-5);
}

}  // namespace

extern const Reproducer running_max_zero{"running_max_zero", "B12",
                                         "the running maximum starts at 0", run_all};

}  // namespace talea::repro
