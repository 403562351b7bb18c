// What: the error of the target's own gradient against 1 - p, as comma-separated lines.
// Why: docs/numerics.md shows it; the figure is drawn from a run, never by hand.
// Never: measures time. tools/numerics_figure calls it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "yardsticks/linear_cross_entropy/eager.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"

namespace {

using namespace talea;
using namespace talea::testing;

constexpr int64_t vocab = 64, rows = 64;

// With an identity as weight, hidden is the logits and dx is dz.
Case confident(DType dtype, double rest) {
  Case c = plain_case({.tokens = rows, .hidden = vocab, .vocab = vocab, .dtype = dtype, .seed = 5});
  Random random(static_cast<uint64_t>(-std::log10(rest) * 10) + 1);
  for (int64_t v = 0; v < vocab; ++v)
    for (int64_t i = 0; i < vocab; ++i) c.in.weight.set(v, i, v == i ? 1 : 0);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t v = 0; v < vocab; ++v) c.in.hidden.set(t, v, 0.5 * random.normal());
    c.in.hidden.set(t, c.in.targets.integer(t), std::log((vocab - 1) * (1 - rest) / rest));
  }
  c.options.reduction = Reduction::none;
  want_everything(c);
  c.out.dx = Array(DType::f32, {rows, vocab});
  return c;
}

// The median of |value - truth| / |truth| over the rows.
template <typename Value>
double median_error(const Case& c, const Answer& truth, Value value) {
  std::vector<double> errors;
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t y = c.in.targets.integer(t);
    const Real dz = truth.dz[static_cast<size_t>(t * vocab + y)];
    errors.push_back(static_cast<double>(std::fabs(value(t, y) - dz) / std::fabs(dz)));
  }
  std::nth_element(errors.begin(), errors.begin() + rows / 2, errors.end());
  return errors[rows / 2];
}

double lane_error(const Case& c, const Answer& truth) {
  std::string why;
  const Outcome o = run_lane(host_place(), host_lane(), c);
  return median_error(c, truth, [&](int64_t t, int64_t y) { return o.out.dx.get(t, y); });
}

}  // namespace

int main() {
  std::puts("one_minus_p,p_in_bf16_minus_1,p_in_fp32_minus_1,talea_fp32,talea_bf16");
  for (int step = 2; step <= 16; ++step) {
    const double rest = std::pow(10.0, -0.5 * step);
    const Case c = confident(DType::f32, rest), half = confident(DType::bf16, rest);
    const Answer truth = oracle(c), fp32 = eager(c, false);
    const auto p = [&](int64_t t, int64_t y) {  // as an fp32 log-softmax gives it
      return std::exp(static_cast<float>(fp32.logits[static_cast<size_t>(t * vocab + y)]) -
                      static_cast<float>(fp32.lse[static_cast<size_t>(t)]));
    };
    std::printf(
        "%.3e,%.1e,%.1e,%.1e,%.1e\n", rest,
        median_error(c, truth,
                     [&](int64_t t, int64_t y) { return rounded(DType::bf16, Real(p(t, y))) - 1; }),
        median_error(c, truth, [&](int64_t t, int64_t y) { return Real(p(t, y) - 1.0f); }),
        lane_error(c, truth), lane_error(half, oracle(half)));
  }
  return 0;
}
