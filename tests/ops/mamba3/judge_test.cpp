// What: what a tensor of few numbers is granted: the roundings of the rows that a lane multiplies.
// Why: of one number eager arithmetic has one error, which by luck is small.
// Never: grants a large tensor, or a lane of wider operands, anything.
#include "yardsticks/mamba3/judge.hpp"

#include <algorithm>
#include <cmath>

#include "ops/mamba3/run.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

// One token, no states: d_trap is one number a head.
Case one_token(uint64_t seed, int64_t heads) {
  Sizes s;
  s.H = heads, s.G = 1, s.N = 32, s.P = 16, s.R = 2, s.A = 16;
  Case c = full_case(s, DType::bf16, seed);
  for (const char* state : {"angle", "ssm", "k", "v"}) {
    c.in.erase(std::string("initial_") + state);
    c.in.erase(std::string("d_final_") + state);
  }
  c.options.head_norm = false;
  c.in.erase("norm_weight");
  c.fp32_outputs = true;
  return c;
}

std::string judged(const Case& c, double deviations, bool rounds_operands) {
  const Values truth = oracle(c);
  HostTensor exact(DType::f32, shape_of(c, "d_trap")), ours = exact;
  for (int64_t i = 0; i < exact.elements(); ++i) {
    const auto at = static_cast<size_t>(i);
    exact.set(i, truth.at("d_trap")[at]);
    ours.set(i, truth.at("d_trap")[at] + (i == 0 ? deviations : 0) * truth.at("rounds:d_trap")[at]);
  }
  return judge(c, {{"d_trap", ours}}, truth, {{"d_trap", exact}}, rounds_operands);
}

TEST(ScanJudge, ANumberIsGrantedFiveDeviationsOfItsRoundings) {
  for (const int64_t heads : {1, 2, 20}) {
    const Case c = one_token(3, heads);
    EXPECT_EQ(judged(c, 4.9, true), "") << heads;
    EXPECT_NE(judged(c, 6.5, true), "") << heads;
    EXPECT_NE(judged(c, 4.9, false), "") << heads;
  }
  const Values many = oracle(one_token(3, 64));
  for (const double x : many.at("rounds:d_trap")) EXPECT_EQ(x, 0);
}

TEST(ScanJudge, RowsThatNothingRoundsAreGrantedNothing) {
  Case c = one_token(4, 1);
  for (const char* name : {"angles", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out", "z"})
    c.in.erase(name);
  c.in.erase("d_out");
  fill(c, "d_out", DType::bf16, 5);
  EXPECT_EQ(oracle(c).at("rounds:d_trap")[0], 0);
}

// The kernels' text rounds what the derivation says that it does, and no more.
TEST(ScanJudge, TheDeviationIsWhatTheKernelsLeave) {
  const std::vector<std::string> lanes = tested_lanes();
  if (std::count(lanes.begin(), lanes.end(), device_text) == 0) GTEST_SKIP() << "no CUDA in it";
  How how;
  how.only = {"out", "d_trap"};
  double square = 0, worst = 0;
  int numbers = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    const Case c = one_token(seed, 2);
    const Values truth = oracle(c);
    const std::vector<double> ours = run(device_text, c, how).out.at("d_trap").values();
    for (size_t i = 0; i < ours.size(); ++i) {
      const double x = (ours[i] - truth.at("d_trap")[i]) / truth.at("rounds:d_trap")[i];
      square += x * x, worst = std::max(worst, std::abs(x)), ++numbers;
    }
  }
  RecordProperty("deviation", std::to_string(std::sqrt(square / numbers)));
  EXPECT_GT(square / numbers, 0.7);
  EXPECT_LT(square / numbers, 1.4);
  EXPECT_LT(worst, 5);
}

}  // namespace
}  // namespace talea::yardsticks::mamba3
