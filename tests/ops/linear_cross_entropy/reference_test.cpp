// What: the reference lane against numbers worked out by hand.
// Why: the oracle itself needs a check that shares none of its code.
// Never: compares the reference with another lane.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "talea/linear_cross_entropy.hpp"

namespace talea {
namespace {

TEST(Reference, TwoTokensByHand) {
  // Logits are the weights themselves (hidden = 1): row 0 sees (0, log 3), row 1 twice that.
  const double log3 = std::log(3.0);
  std::vector<double> x = {1, 2}, w = {0, log3};
  std::vector<int64_t> y = {1, 0};
  double loss = 0;
  std::vector<double> dx(2), dw(2);
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(x.data(), DType::f64, {2, 1});
  in.weight = make_tensor(w.data(), DType::f64, {2, 1});
  in.targets = make_tensor(y.data(), DType::i64, {2});
  LinearCrossEntropyOutputs out;
  out.loss = make_tensor(&loss, DType::f64, {});
  out.dx = make_tensor(dx.data(), DType::f64, {2, 1});
  out.dw = make_tensor(dw.data(), DType::f64, {2, 1});
  LinearCrossEntropyOptions options;
  options.lane = "reference";
  const auto problem = describe(in, out, options);
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(problem)));
  const auto result = linear_cross_entropy(
      in, out, options, {workspace.data(), static_cast<int64_t>(workspace.size())});
  // p(row 0) = (1/4, 3/4), p(row 1) = (1/10, 9/10); losses log(4/3) and log 10, mean over 2.
  EXPECT_NEAR(loss, (std::log(4.0 / 3.0) + std::log(10.0)) / 2, 1e-14);
  EXPECT_NEAR(dx[0], -0.25 * log3 / 2, 1e-14);
  EXPECT_NEAR(dx[1], 0.9 * log3 / 2, 1e-14);
  EXPECT_NEAR(dw[0], (0.25 * 1 - 0.9 * 2) / 2, 1e-14);
  EXPECT_NEAR(dw[1], (-0.25 * 1 + 0.9 * 2) / 2, 1e-14);
  EXPECT_EQ(result.lane, "reference");
  EXPECT_EQ(result.valid_tokens, 2);
}

}  // namespace
}  // namespace talea
