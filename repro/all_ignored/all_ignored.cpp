// What: a micro-batch whose every target is ignored.
// Why: the mean divides 0 by 0, and NaN reaches the weights of the whole model.
// Never: lets our gradient be anything but exactly 0 there.
#include <cmath>

#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

Answer divided_by_zero(const Data& d) {
  Answer a;
  const double n = static_cast<double>(valid_count(d));  // 0
  a.dx.assign(d.x.size(), 0.0 / n);
  a.dw.assign(d.w.size(), 0.0 / n);
  a.loss = 0.0 / n;
  return a;
}

double largest(const std::vector<double>& g) {
  double most = 0;
  for (double v : g) most = std::isnan(v) ? NAN : std::max(most, std::abs(v));
  return most;
}

void run_all(Report& r) {
  Data d = make_data(8, 8, 32, 171);
  std::fill(d.y.begin(), d.y.end(), d.options.ignore_index);
  r.broken("largest |dW| of an all-ignored batch, divided by its count",
           largest(divided_by_zero(d).dw), 0.0);
  const Answer good = r.fixed([&] { return run(d, "auto"); }, [&] { return divided_by_zero(d); });
  r.ours("largest |dX| (exactly 0)", largest(good.dx), 0.0);
  r.ours("largest |dW| (exactly 0)", largest(good.dw), 0.0);
  Data zero = d;
  zero.options.on_empty = OnEmpty::zero;
  r.figure("loss with on_empty = nan (as PyTorch)", run(d, "auto").loss);
  r.figure("loss with on_empty = zero", run(zero, "auto").loss);
}

}  // namespace

extern const Reproducer all_ignored{"all_ignored", "B16", "every target of a batch is ignored",
                                    run_all};

}  // namespace talea::repro
