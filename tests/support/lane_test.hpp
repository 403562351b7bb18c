// What: the fixture of every test that runs on each lane the machine has.
// Why: one parametrised suite; a lane that is added to the table is tested without further changes.
// Never: passes in silence where the device is missing: such cases are reported as skipped.
#pragma once

#include <gtest/gtest.h>

#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {

// What training asks for: a mean and both gradients, of 16 bits.
inline Case training_case(int64_t tokens, int64_t hidden, int64_t vocab) {
  Case c = plain_case({.tokens = tokens, .hidden = hidden, .vocab = vocab, .dtype = DType::bf16});
  c.out = {};
  c.out.loss = Array(DType::f32, {});
  c.out.dx = Array(DType::bf16, {tokens, hidden}), c.out.dw = Array(DType::bf16, {vocab, hidden});
  c.options.reduction = Reduction::mean;
  return c;
}

class LaneTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string why;
    place_ = place_of(GetParam(), why);
    if (!place_) GTEST_SKIP() << why;
    runs_before_ = runs_of(lane());
  }

  // A test whose every case was declined, or that had none, has shown nothing.
  void TearDown() override {
    if (!place_ || IsSkipped()) return;
    EXPECT_GT(runs_of(lane()), runs_before_) << "lane " << lane() << " ran no case of this test";
  }

  const std::string& lane() const { return GetParam(); }
  Place& place() { return *place_; }
  bool accepts(const Case& c) { return !declines(place(), lane(), c); }
  Outcome run(const Case& c) { return run_lane(place(), lane(), c); }
  std::string judged(const Case& c, const Outcome& o, const Yardsticks& y) {
    return judged(c, o.out, o.result, y);
  }
  std::string judged(const Case& c, const CaseOutputs& out, const LinearCrossEntropyResult& result,
                     const Yardsticks& y) {
    if (!needs_16bit_rows(lane())) return judge(c, out, y, standing_of(lane(), result));
    const Case f = fitted(lane(), c);
    return judge(f, out, yardsticks(f), standing_of(lane(), result));
  }
  // Right against both yardsticks, or declined with a reason where that is allowed.
  void expect_right(const Case& c, const std::string& what = "") {
    EXPECT_EQ(verify(lane(), c), "") << what;
  }

 private:
  Place* place_ = nullptr;
  int64_t runs_before_ = 0;
};

#define TALEA_EVERY_LANE(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(Lanes, suite, ::testing::ValuesIn(::talea::testing::lanes_here()), \
                           [](const auto& info) { return info.param; })

}  // namespace talea::testing
