// What: a fused loss that takes `lm_head.weight` where the head carries an adapter.
// Why: the attribute is the frozen base; the adapter beside it is in neither loss nor gradient.
// Never: guesses at a head: ours is given the weight that the model multiplies by.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

constexpr int64_t rank = 4;
constexpr float scale = 2.f;

struct Adapter {
  std::vector<float> a, b;  // [rank, hidden], [vocab, rank]
};

Data merged(const Data& base, const Adapter& adapter) {
  Data d = base;
  for (int64_t v = 0; v < d.vocab; ++v)
    for (int64_t k = 0; k < rank; ++k)
      for (int64_t i = 0; i < d.hidden; ++i)
        d.w[v * d.hidden + i] += scale * adapter.b[v * rank + k] * adapter.a[k * d.hidden + i];
  return d;
}

// Gradient of B [vocab, rank] by the chain rule through the merged weight.
std::vector<double> gradient_of_b(const Data& d, const Adapter& adapter, const Answer& answer) {
  std::vector<double> grad(static_cast<size_t>(d.vocab * rank), 0);
  for (int64_t v = 0; v < d.vocab; ++v)
    for (int64_t k = 0; k < rank; ++k)
      for (int64_t i = 0; i < d.hidden; ++i)
        grad[v * rank + k] += scale * answer.dw[v * d.hidden + i] * adapter.a[k * d.hidden + i];
  return grad;
}

void run_all(Report& r) {
  const Data base = make_data(24, 32, 64, 151);
  const Data a = make_data(rank, 32, 1, 152), b = make_data(64, rank, 1, 153);
  const Adapter adapter{a.x, b.x};
  const Data whole = merged(base, adapter);
  const Answer truth = run(whole, "reference");
  const std::vector<double> right = gradient_of_b(whole, adapter, truth);
  // What the fused path is given is the base; nothing depends on the adapter.
  const Answer bad = run(base, "reference");
  const std::vector<double> none(right.size(), 0);
  r.broken("loss of the base weight alone", relative(bad.loss, truth.loss), 0.1);
  r.broken("gradient of the adapter: none", relative_l2(none, right), 0.9);
  r.broken("dX without the adapter", relative_l2(bad.dx, truth.dx), 0.1);
  const Answer good = r.fixed([&] { return run(whole, "auto"); }, [&] { return bad; });
  const std::vector<double> ours = r.fix_disabled() ? none : gradient_of_b(whole, adapter, good);
  r.ours("loss of the merged weight", relative(good.loss, truth.loss), 1e-6);
  r.ours("gradient of the adapter", relative_l2(ours, right), 1e-5);
}

}  // namespace

extern const Reproducer dropped_adapter{"dropped_adapter", "B29",
                                        "an adapter dropped from the head", run_all};

}  // namespace talea::repro
