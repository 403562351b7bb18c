// What: the deviation of one logit in fp32 arithmetic, in roundings of 2^-24.
// Why: what a sum of products leaves is no share of the sum where its terms cancel.
// Never: asks in which order a lane adds.
#include <algorithm>
#include <cmath>

#include "yardsticks/linear_cross_entropy/oracle.hpp"

namespace talea::testing {
namespace {

Real square(Real x) { return x * x; }

}  // namespace

Real logit_walk(const Case& c, int64_t t, int64_t v, const Real* x, const Real* w) {
  const LinearCrossEntropyOptions& o = c.options;
  const auto d = Real(c.hidden());
  if (d == 0) return 0;
  Real dot = 0, squares = 0;
  for (int64_t i = 0; i < c.hidden(); ++i) dot += x[i] * w[i], squares += square(x[i] * w[i]);
  // The square of the k-th sum, in an order that knows nothing of the terms: k^2/D^2 of the
  // product's, and what k of D terms are spread. Here are all D of them.
  const Real sums = square(dot) * (d + 1) * (2 * d + 1) / (6 * d) +
                    std::max(squares - square(dot) / d, Real(0)) * (d + 1) / 6;
  const Real s = Real(o.logit_scale) * (c.in.token_scale.present() ? c.in.token_scale.get(t) : 1);
  const Real a = s * dot + (c.in.bias.present() ? c.in.bias.get(v) : 0);
  const int scalings = (o.logit_scale != 1) + c.in.token_scale.present();
  Real variance = square(s) * (sums + scalings * square(dot));
  if (c.in.bias.present()) variance += square(a);
  if (o.softcap > 0)
    variance = variance / square(square(std::cosh(a / o.softcap))) +
               square(o.softcap * std::tanh(a / o.softcap));
  return std::sqrt(variance / 3);
}

}  // namespace talea::testing
