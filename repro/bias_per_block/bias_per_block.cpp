// What: a bias added once per block of the hidden dimension instead of once per logit.
// Why: the product loops over blocks of D and the epilogue was put inside the loop.
// Never: adds a bias twice in our call.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer bias_in_the_loop(const Data& d, int64_t block) {
  Data wrong = d;
  for (float& b : wrong.bias) b *= static_cast<float>((d.hidden + block - 1) / block);
  return run(wrong, "reference");
}

void run_all(Report& r) {
  Data d = make_data(24, 96, 128, 71);
  Data bias = make_data(1, 128, 1, 72, 1.0);
  d.bias.assign(bias.x.begin(), bias.x.end());
  const Answer truth = run(d, "reference");
  const Answer bad = bias_in_the_loop(d, 32);
  r.broken("loss, bias once per 32 of 96 hidden units", relative(bad.loss, truth.loss), 0.01);
  r.broken("dX, bias once per 32 of 96 hidden units", relative_l2(bad.dx, truth.dx), 0.01);
  const Answer good =
      r.fixed([&] { return run(d, "auto"); }, [&] { return bias_in_the_loop(d, 32); });
  r.ours("loss", relative(good.loss, truth.loss), 1e-6);
  r.ours("dX", relative_l2(good.dx, truth.dx), 1e-5);
}

}  // namespace

extern const Reproducer bias_per_block{"bias_per_block", "B11",
                                       "the bias added once per block of D", run_all};

}  // namespace talea::repro
