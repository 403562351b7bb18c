// What: the comparison itself: each thing it must catch, caught.
// Why: a gate that NaN passes, or that cannot fail, is worse than no gate (B21, B25, B26).
// Never: runs a lane.
#include "yardsticks/linear_cross_entropy/compare.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "yardsticks/linear_cross_entropy/eager.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

Array from(const std::vector<Real>& values) {
  Array a(DType::f64, {static_cast<int64_t>(values.size())});
  for (size_t k = 0; k < values.size(); ++k) a.set(static_cast<int64_t>(k), 0, values[k]);
  return a;
}

std::string against(const std::vector<Real>& ours, const std::vector<Real>& truth,
                    const std::vector<Real>& eager, Rule rule = {}) {
  return compare("x", from(ours), truth, {&eager}, rule);
}

const Real nan = std::nan("");
const Real inf = INFINITY;

Rule rounded_rule() {
  Rule rule;
  rule.e = 1e-4L;
  rule.worst_times = 2;
  rule.l2_times = 1;
  return rule;
}

TEST(Compare, TruthPasses) { EXPECT_EQ(against({1, 2}, {1, 2}, {1, 2}), ""); }

TEST(Compare, BoundIsEagersErrorPlusE) {
  EXPECT_EQ(against({1, 2 + 1.9e-6}, {1, 2}, {1, 2}), "");  // e = 1e-6 of the magnitude 2
  EXPECT_NE(against({1, 2 + 2.1e-6}, {1, 2}, {1, 2}), "");
  EXPECT_EQ(against({1, 2 + 2.1e-6}, {1, 2}, {1, 2 - 1e-6}), "");
  EXPECT_NE(against({1 + 2.1e-6, 2}, {1, 2}, {1, 2 - 1e-6}), "") << "elementwise";
  EXPECT_NE(against({1.5}, {1}, {1}), "") << "half as much again must not pass (B26)";
}

TEST(Compare, NaNFailsOnEitherSide) {
  EXPECT_NE(against({nan}, {1}, {1}), "");
  EXPECT_NE(against({1}, {nan}, {1}), "");
  EXPECT_EQ(against({nan}, {nan}, {nan}), "");
  EXPECT_EQ(against({1}, {1}, {nan}), "") << "a NaN of the yardstick widens nothing";
  EXPECT_NE(against({1.1}, {1}, {nan}), "");
}

TEST(Compare, InfinitiesMatchInSign) {
  EXPECT_EQ(against({inf}, {inf}, {inf}), "");
  EXPECT_NE(against({inf}, {-inf}, {inf}), "");
  EXPECT_NE(against({inf}, {1}, {1}), "");
  EXPECT_NE(against({1}, {inf}, {1}), "");
  EXPECT_NE(against({nan}, {inf}, {1}), "");
}

TEST(Compare, MissingElementsFail) { EXPECT_NE(against({1}, {1, 2}, {1, 2}), ""); }

TEST(Compare, SixteenBitGradientsUseTheWorstEagerError) {
  Rule rule = rounded_rule();
  rule.l2_times = 0;
  EXPECT_EQ(against({1, 2.019}, {1, 2}, {1.01, 2}, rule), "");
  EXPECT_NE(against({1, 2.021}, {1, 2}, {1.01, 2}, rule), "");
}

// fp16 has 4364 and 4368 beside 4366.9, and eager arithmetic an infinity on its way.
TEST(Compare, OneRoundingOfTheOutputIsNoError) {
  Array ours(DType::f16, {1});
  const std::vector<Real> truth = {4366.9L}, eager = {INFINITY};
  for (const double value : {4368.0, 4364.0}) {
    ours.set(0, 0, value);
    Rule rule = rounded_rule();
    rule.l2_times = 0;
    EXPECT_EQ(compare("x", ours, truth, {&eager}, rule).empty(), value == 4368.0) << value;
  }
}

TEST(Compare, RelativeL2MustNotExceedEagers) {
  const std::vector<Real> truth(5000, 1), eager(5000, 1.01L);
  std::vector<Real> ours(5000, 1.015L);  // every element within twice the worst eager error
  EXPECT_NE(against(ours, truth, eager, rounded_rule()), "");
  ours.assign(5000, 1.009L);
  EXPECT_EQ(against(ours, truth, eager, rounded_rule()), "");
}

// A right case whose outputs are then spoiled, one at a time.
class Judged : public ::testing::Test {
 protected:
  Judged() : c_(plain_case({.tokens = 6, .hidden = 4, .vocab = 9, .bias = true})) {
    c_.in.targets.set_integer(2, 0, -100);
    want_everything(c_, 3);
    y_ = yardsticks(c_);
    ours_ = c_.out;
    write(ours_.loss, y_.truth.loss);
    write(ours_.lse, y_.truth.lse);
    write(ours_.target_logprob, y_.truth.target_logprob);
    write(ours_.entropy, y_.truth.entropy);
    write(ours_.dx, y_.truth.dx);
    write(ours_.dw, y_.truth.dw);
    write(ours_.db, y_.truth.db);
    Real hits = 0;
    for (int64_t t = 0; t < 6; ++t) rank(t, hits);
    ours_.accuracy.set(0, 0, hits / 5);
  }

  void write(Array& a, const std::vector<Real>& values) {
    const int64_t columns = a.shape().size() > 1 ? a.shape()[1] : 1;
    for (int64_t k = 0; k < a.elements(); ++k)
      a.set(k / columns, k % columns, values[static_cast<size_t>(k)]);
  }

  void rank(int64_t t, Real& hits) {
    const bool valid = y_.truth.rows[static_cast<size_t>(t)] == Row::valid;
    const Real* z = y_.truth.logits.data() + t * 9;
    std::vector<int64_t> ids = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    if (valid) std::sort(ids.begin(), ids.end(), [&](auto a, auto b) { return z[a] > z[b]; });
    ours_.argmax.set_integer(t, 0, valid ? ids[0] : -1);
    hits += valid && ids[0] == c_.in.targets.integer(t);
    for (int64_t j = 0; j < 3; ++j) {
      const int64_t id = ids[static_cast<size_t>(j)];
      ours_.topk_ids.set_integer(t, j, valid ? id : -1);
      ours_.topk_values.set(t, j, valid ? z[id] : 0);
      ours_.topk_logprobs.set(t, j, valid ? z[id] - y_.truth.lse[static_cast<size_t>(t)] : 0);
    }
  }

  std::string verdict() { return judge(c_, ours_, y_); }

  Case c_;
  Yardsticks y_;
  CaseOutputs ours_;
};

TEST_F(Judged, TheTruthPasses) { EXPECT_EQ(verdict(), ""); }

TEST_F(Judged, EveryOutputIsLookedAt) {
  for (const auto& [name, member] : CaseOutputs::members) {
    const Array kept = ours_.*member;
    Array& a = ours_.*member;
    if (is_floating(a.dtype()))
      a.set(0, 0, a.get() * 1.01L + 0.01L);
    else
      a.set_integer(0, 0, (a.integer() + 1) % 9);
    EXPECT_NE(verdict(), "") << name << " was wrong and passed";
    ours_.*member = kept;
    if (!is_floating(a.dtype())) continue;
    a.set(0, 0, NAN);
    EXPECT_NE(verdict(), "") << name << " was NaN and passed";
    ours_.*member = kept;
  }
}

TEST_F(Judged, EqualLossesDoNotExcuseAWrongGradient) {
  ours_.dw.set(1, 1, ours_.dw.get(1, 1) * 1.015L);
  EXPECT_NE(verdict(), "");
}

// All rows of the weight alike: dX is 0 and all that is left is what its terms leave. An error of
// nine tenths of the bound passes, a tenth more than the bound does not.
TEST_F(Judged, CancellationIsNoLicence) {
  for (int64_t v = 1; v < 9; ++v)
    for (int64_t i = 0; i < 4; ++i) c_.in.weight.set(v, i, c_.in.weight.get(0, i));
  c_.in.bias = Array();
  want_everything(c_);
  y_ = yardsticks(c_);
  Real eager = 0;
  for (const Answer& other : y_.eager)
    eager = std::max(eager, std::fabs(other.dx[5] - y_.truth.dx[5]));
  const Real floor = floor_share * 0x1p-24L * std::max(y_.truth.dx_floor[5], y_.truth.dx_walk[5]);
  EXPECT_GT(floor, eager + 1e-6L * std::fabs(y_.truth.dx[5])) << "nothing of the floor is tested";
  CaseOutputs only;
  only.dx = c_.out.dx;
  write(only.dx, y_.truth.dx);
  only.dx.set(1, 1, y_.truth.dx[5] + eager + 0.9L * floor);
  const Used lanes = used_by_products;  // what this test plants is no lane's need
  EXPECT_EQ(judge(c_, only, y_), "");
  used_by_products = lanes;
  only.dx.set(1, 1, y_.truth.dx[5] + eager + 1.1L * floor);
  EXPECT_NE(judge(c_, only, y_), "");
}

TEST_F(Judged, AnIgnoredRowIsExactlyZero) {
  ours_.dx.set(2, 1, 1e-30L);
  EXPECT_NE(verdict(), "");
}

TEST(SameBits, SeesOneBitAndTheSignOfZero) {
  const Array a = from({1, 0}), b = from({1 + 0x1p-52L, 0}), c = from({1, -0.0L});
  EXPECT_EQ(same_bits("x", a, a), "");
  EXPECT_NE(same_bits("x", a, b), "");
  EXPECT_NE(same_bits("x", a, c), "");
  EXPECT_NE(same_bits("x", a, from({1})), "");
}

}  // namespace
}  // namespace talea::testing
