// What: a bf16 dW that is summed over chunks in its own dtype (dw_sum), on the lanes of a device.
// Why: each chunk rounds the sum; the targets' share, rounded by all that follow, would show.
// Never: looser than what is promised of it: 1.25 of eager's error.
#include <cmath>

#include "ops/linear_cross_entropy/forced.hpp"
#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

std::vector<std::string> of_devices() {
  std::vector<std::string> found;
  for (const std::string& lane : lanes_here())
    if (lane == "sm90" || lane == "cuda") found.push_back(lane);
  return found;
}

class DwSum : public LaneTest {
 protected:
  void SetUp() override {
    LaneTest::SetUp();
    before_ = lce::forced;
    lce::forced.two_terms = lce::forced.slices = false;
  }
  void TearDown() override {
    lce::forced = before_;
    LaneTest::TearDown();
  }

  // As many chunks as the lane makes.
  void must_be_right(Case c, const std::string& what) {
    c.options.dw_sum = DType::bf16, c.options.workspace_limit_bytes = 0;
    ASSERT_TRUE(accepts(c)) << what << " is declined";
    Outcome o = run(c);
    EXPECT_EQ(o.result.accumulator_dw, "bf16, rounded by each chunk (dw_sum)") << what;
    EXPECT_GT(o.result.chunks, 1) << what;
    const Yardsticks y = yardsticks(c);
    Real error = 0, eager = 0;
    for (size_t i = 0; i < y.truth.dw.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const Real ours =
          o.out.dw.get(at / c.out.dw.shape()[1], at % c.out.dw.shape()[1]) - y.truth.dw[i];
      const Real theirs = y.eager[0].dw[i] - y.truth.dw[i];
      error += ours * ours, eager += theirs * theirs;
    }
    EXPECT_LE(std::sqrt(error), 1.25L * std::sqrt(eager)) << what;
    c.out.dw = o.out.dw = Array();
    EXPECT_EQ(judged(c, o.out, o.result, y), "") << what;  // all else as ever
  }

 private:
  lce::Forced before_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DwSum);
INSTANTIATE_TEST_SUITE_P(Lanes, DwSum, ::testing::ValuesIn(of_devices()),
                         [](const auto& info) { return info.param; });

TEST_P(DwSum, ManyChunks) {
  must_be_right(training_case(1100, 72, 1000), "nine chunks of lane cuda");
  must_be_right(training_case(600, 40, 701), "a tail of columns");
  Case c = training_case(600, 40, 400);
  for (int64_t t = 0; t < 600; ++t) c.in.targets.set_integer(t, 0, t % 3);
  must_be_right(c, "three targets");
  for (int64_t t = 150; t < 500; ++t) c.in.targets.set_integer(t, 0, -100);
  must_be_right(c, "chunks without rows");
  for (int64_t t = 0; t < 600; ++t) c.in.targets.set_integer(t, 0, -100);
  c.options.on_empty = OnEmpty::zero;
  must_be_right(c, "no row at all");
}

TEST_P(DwSum, WhatElseIsAddedToDw) {
  Spec s{.seed = 37, .tokens = 600, .hidden = 40, .vocab = 701, .types = Types::bf16};
  s.reduction = Reduction::mean;
  s.bias = s.class_weight = s.token_weight = true;
  s.label_smoothing = 0.1, s.z_loss = 0.01, s.padding = 3, s.ignored_percent = 30;
  must_be_right(make_case(s), "smoothing and weights");
}

}  // namespace
}  // namespace talea::testing
