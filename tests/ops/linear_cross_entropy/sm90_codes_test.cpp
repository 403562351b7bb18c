// What: a bf16 dW of lane sm90 that is summed over chunks in codes, 128 under one exponent.
// Why: small problems are one chunk; here the shortest chunks and the codes are forced.
// Never: looser than the contract's accuracy rule.
#include <algorithm>
#include <cmath>

#include "ops/linear_cross_entropy/forced.hpp"
#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

std::vector<std::string> hopper() {
  const auto all = lanes_here();
  if (std::find(all.begin(), all.end(), "sm90") == all.end()) return {};
  return {"sm90"};
}

class Sm90Codes : public LaneTest {
 protected:
  void SetUp() override {
    LaneTest::SetUp();
    before_ = lce::forced;
    lce::forced.codes = true, lce::forced.two_terms = false;
  }
  void TearDown() override {
    lce::forced = before_;
    LaneTest::TearDown();
  }

  void must_be_right(Case c, const std::string& what) {
    ASSERT_TRUE(accepts(c)) << what << " is declined";
    EXPECT_EQ(run(c).result.accumulator_dw,
              "16 bits and an exponent for 128 of them, added in fp32, rounded once")
        << what;
    expect_right(c, what);
  }

 private:
  lce::Forced before_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Sm90Codes);
INSTANTIATE_TEST_SUITE_P(Lanes, Sm90Codes, ::testing::ValuesIn(hopper()),
                         [](const auto& info) { return info.param; });

// Columns and words that do not fill their blocks; two chunks and more; several tiles a block.
TEST_P(Sm90Codes, ShapesAndChunks) {
  must_be_right(training_case(300, 72, 2001), "two chunks");
  must_be_right(training_case(1100, 136, 1000), "five chunks");
  must_be_right(training_case(600, 520, 2001), "many tiles");
  must_be_right(training_case(4000, 40, 700), "16 chunks");
}

TEST_P(Sm90Codes, WhatElseIsAddedToDw) {
  Spec s{.seed = 31, .tokens = 600, .hidden = 72, .vocab = 1901, .types = Types::bf16};
  s.reduction = Reduction::mean;
  s.bias = s.class_weight = s.token_weight = true;
  s.label_smoothing = 0.1, s.z_loss = 0.01, s.padding = 3, s.ignored_percent = 30;
  must_be_right(make_case(s), "smoothing and weights");
  Case c = training_case(600, 72, 901);
  for (int64_t t = 0; t < 600; ++t) c.in.targets.set_integer(t, 0, t % 3);
  must_be_right(c, "three targets");
  for (int64_t t = 200; t < 600; ++t) c.in.targets.set_integer(t, 0, -100);
  must_be_right(c, "the last chunks are empty");
  for (int64_t t = 0; t < 600; ++t) c.in.targets.set_integer(t, 0, -100);
  c.options.on_empty = OnEmpty::zero;
  must_be_right(c, "no row at all");
}

// Columns and tokens of very different size: each block's exponent follows its largest sum.
TEST_P(Sm90Codes, SizesFarApart) {
  Case c = training_case(600, 72, 901);
  for (int64_t t = 0; t < 600; ++t)
    for (int64_t i = 0; i < 72; i += 17) c.in.hidden.set(t, i, 40 * c.in.hidden.get(t, i));
  must_be_right(c, "outlier columns");
  for (const double size : {1e-30, 1e30}) {
    Case d = training_case(600, 72, 901);
    d.options.denominator = Denominator::given, d.options.denominator_value = size;
    must_be_right(d, "scaled");
  }
  for (const int64_t row : {5, 300, 590}) {  // of the first chunk, one between, the last
    Case n = training_case(600, 72, 901);
    n.in.hidden.set(row, 3, NAN);
    must_be_right(n, "NaN");
  }
}

TEST_P(Sm90Codes, SameBitsAgain) {
  const Case c = training_case(1100, 264, 1000);
  EXPECT_EQ(same_bits(run(c).out, run(c).out), "");
}

}  // namespace
}  // namespace talea::testing
