// What: the test oracle against numbers worked out by hand and against central differences.
// Why: every other test believes it.
// Never: runs a lane.
#include "yardsticks/linear_cross_entropy/oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

TEST(Oracle, TwoClassesByHand) {
  Case c = plain_case({.tokens = 1, .hidden = 1, .vocab = 2, .dtype = DType::f64});
  c.in.hidden.set(0, 0, 1);
  c.in.weight.set(0, 0, 0);
  c.in.weight.set(1, 0, std::log(3.0));  // p = (1/4, 3/4)
  c.in.targets.set_integer(0, 0, 0);
  c.options.label_smoothing = 0.5;
  c.options.z_loss = 0.25;
  const Answer a = oracle(c);
  const double l4 = std::log(4.0), l43 = std::log(4.0 / 3.0);
  EXPECT_NEAR(double(a.lse[0]), l4, 1e-15);
  EXPECT_NEAR(double(a.entropy[0]), 0.25 * l4 + 0.75 * l43, 1e-15);
  EXPECT_NEAR(double(a.loss[0]), 0.5 * l4 + 0.25 * (l4 + l43) + 0.25 * l4 * l4, 1e-15);
  // dz_1 = (1 + 2 zeta lse) p_1 - eps / V
  EXPECT_NEAR(double(a.dz[1]), (1 + 0.5 * l4) * 0.75 - 0.25, 1e-15);
  EXPECT_NEAR(double(a.dz[0] + a.dz[1]), 0.5 * l4, 1e-15);
  EXPECT_EQ(a.argmax[0], 1);
}

TEST(Oracle, ConfidentTargetKeepsItsDigits) {
  Case c = plain_case({.tokens = 1, .hidden = 1, .vocab = 2, .dtype = DType::f64});
  c.in.hidden.set(0, 0, 1);
  c.in.weight.set(0, 0, 60);
  c.in.weight.set(1, 0, 0);
  c.in.targets.set_integer(0, 0, 0);
  const Answer a = oracle(c);
  EXPECT_NEAR(double(a.dz[0] / -std::exp(-60.0L)), 1, 1e-15);
  EXPECT_NEAR(double(a.loss[0] / std::exp(-60.0L)), 1, 1e-15);
}

// H = p_0 log(1 + e) + p_1 (60 + log(1 + e)) with e = exp(-60): the first part is a sixtieth, and
// log p_0 is nothing beside 60. In a gradient they meet again, whichever of the two is the target.
TEST(Oracle, EntropyOfAConfidentRowKeepsItsDigits) {
  for (const int64_t target : {0, 1}) {
    Case c = plain_case({.tokens = 1, .hidden = 1, .vocab = 2, .dtype = DType::f64});
    c.in.hidden.set(0, 0, 1);
    c.in.weight.set(0, 0, 60);
    c.in.weight.set(1, 0, 0);
    c.in.targets.set_integer(0, 0, target);
    c.in.upstream = Array(DType::f32, {});  // 0: the loss has no gradient
    c.in.upstream.set(0, 0, 0);
    c.in.upstream_entropy = Array(DType::f32, {1});
    c.in.upstream_entropy.set(0, 0, 1);
    const Answer a = oracle(c);
    const Real e = std::exp(-60.0L);
    EXPECT_NEAR(double(a.entropy[0] / (61 * e)), 1, 1e-15);
    EXPECT_NEAR(double(a.dz[0] / (-60 * e)), 1, 1e-15);
    EXPECT_NEAR(double(a.dz[1] / (60 * e)), 1, 1e-15);
  }
}

// The scalar whose gradient the oracle claims, from its own outputs.
Real objective(const Case& c) {
  const Answer a = oracle(c);
  Real total = 0;
  const bool vector = c.options.reduction == Reduction::none;
  for (size_t t = 0; t < a.loss.size(); ++t) {
    const Real up = c.in.upstream.present() ? c.in.upstream.get(vector ? int64_t(t) : 0) : Real(1);
    total += up * a.loss[t];
  }
  for (size_t t = 0; t < a.lse.size(); ++t) {
    if (c.in.upstream_lse.present()) total += c.in.upstream_lse.get(int64_t(t)) * a.lse[t];
    if (c.in.upstream_entropy.present())
      total += c.in.upstream_entropy.get(int64_t(t)) * a.entropy[t];
  }
  return total;
}

void expect_slope(Case& c, Array& parameter, const std::vector<Real>& gradient, const char* name) {
  const int64_t columns = parameter.shape().size() > 1 ? parameter.shape()[1] : 1;
  for (int64_t k = 0; k < parameter.elements(); ++k) {
    const int64_t i = k / columns, j = k % columns;
    const Real kept = parameter.get(i, j), h = 1e-4L;
    const auto f = [&](Real step) {
      parameter.set(i, j, kept + step);
      const Real distance = parameter.get(i, j) - kept;
      return std::pair{objective(c), distance};
    };
    const auto [up, a] = f(h);
    const auto [down, b] = f(-h);
    parameter.set(i, j, kept);
    const Real slope = (up - down) / (a - b);
    EXPECT_TRUE(std::fabs(slope - gradient[static_cast<size_t>(k)]) <= 2e-7L)
        << name << "[" << k << "]: slope " << double(slope) << ", gradient "
        << double(gradient[static_cast<size_t>(k)]);
  }
}

TEST(Oracle, GradientsAreSlopes) {
  for (const Soft soft : {Soft::none, Soft::dense, Soft::sparse_with_ignored}) {
    Spec s{.seed = 7, .tokens = 4, .hidden = 3, .vocab = 5, .types = Types::f64};
    s.soft = soft;
    s.reduction = Reduction::none;
    s.bias = s.class_weight = s.token_weight = s.token_scale = true;
    s.label_smoothing = 0.1;
    s.z_loss = 0.01;
    s.softcap = 5;
    s.logit_scale = -1.25;
    s.upstream = Upstream::strided;
    s.upstream_lse = s.upstream_entropy = true;
    s.ignored_percent = 30;
    Case c = make_case(s);
    const Answer a = oracle(c);
    expect_slope(c, c.in.hidden, a.dx, "dx");
    expect_slope(c, c.in.weight, a.dw, "dw");
    expect_slope(c, c.in.bias, a.db, "db");
  }
}

}  // namespace
}  // namespace talea::testing
