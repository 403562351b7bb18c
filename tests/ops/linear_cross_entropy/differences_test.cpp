// What: central differences in fp64 through the library's own reference lane.
// Why: loss and gradient of one lane must belong together, whatever the oracle says.
// Never: shares the gradient formula with anything.
#include <gtest/gtest.h>

#include <cmath>

#include "yardsticks/linear_cross_entropy/generate.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

struct Value {
  Real objective;
  CaseOutputs out;
};

// upstream . loss + upstream_lse . lse + upstream_entropy . entropy
Value evaluate(const std::string& lane, const Case& c) {
  const Outcome o = run_lane(host_place(), lane, c);
  Real total = 0;
  const bool vector = c.options.reduction == Reduction::none;
  for (int64_t t = 0; t < (vector ? c.tokens() : 1); ++t)
    total += (c.in.upstream.present() ? c.in.upstream.get(t) : Real(1)) * o.out.loss.get(t);
  for (int64_t t = 0; t < c.tokens(); ++t) {
    if (c.in.upstream_lse.present()) total += c.in.upstream_lse.get(t) * o.out.lse.get(t);
    if (c.in.upstream_entropy.present())
      total += c.in.upstream_entropy.get(t) * o.out.entropy.get(t);
  }
  return {total, o.out};
}

void expect_slopes(Case& c, Array& parameter, const Array& gradient, const char* name) {
  const int64_t columns = parameter.shape().size() > 1 ? parameter.shape()[1] : 1;
  for (int64_t k = 0; k < parameter.elements(); ++k) {
    const int64_t i = k / columns, j = k % columns;
    const Real kept = parameter.get(i, j), h = 0x1p-13L;
    parameter.set(i, j, kept + h);
    const Real up = evaluate("reference", c).objective;
    parameter.set(i, j, kept - h);
    const Real down = evaluate("reference", c).objective;
    parameter.set(i, j, kept);
    const Real slope = (up - down) / (2 * h), got = gradient.get(i, j);
    EXPECT_TRUE(std::fabs(slope - got) <= 1e-6L * (1 + std::fabs(got)))
        << name << "[" << i << ", " << j << "]: slope " << double(slope) << ", " << double(got);
  }
}

TEST(CentralDifferences, EveryOptionOfTheReference) {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none})
    for (const Soft soft : {Soft::none, Soft::dense, Soft::sparse}) {
      Spec s{.seed = 43, .tokens = 4, .hidden = 3, .vocab = 5, .padding = 2, .types = Types::f64};
      s.soft = soft;
      s.reduction = reduction;
      s.bias = s.class_weight = s.token_weight = s.token_scale = true;
      s.label_smoothing = 0.1;
      s.z_loss = 0.01;
      s.softcap = 5;
      s.logit_scale = 0.75;
      s.upstream = Upstream::reversed;
      s.upstream_lse = s.upstream_entropy = true;
      Case c = make_case(s);
      const CaseOutputs out = evaluate("reference", c).out;
      expect_slopes(c, c.in.hidden, out.dx, "dx");
      expect_slopes(c, c.in.weight, out.dw, "dw");
      expect_slopes(c, c.in.bias, out.db, "db");
    }
}

}  // namespace
}  // namespace talea::testing
