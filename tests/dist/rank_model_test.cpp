// What: the planning model against what can be worked out by hand, and against measured runs.
// Why: a plan for 512 ranks can only be trusted as far as its terms are checked on 2 and 4.
// Never: needs a GPU.
#include "ops/linear_cross_entropy/rank_model.hpp"

#include <gtest/gtest.h>

#include "support/expect_error.hpp"

namespace talea::lce {
namespace {

using testing::expect_error;

RankShape llama(int64_t ranks, int64_t nodes = 1) {
  RankShape s;
  s.tokens = 8192;
  s.hidden = 4096;
  s.vocab = 128256;
  s.ranks = ranks;
  s.nodes = nodes;
  s.workspace_limit_bytes = int64_t{1} << 30;
  return s;
}

TEST(RankModel, OneRankSendsNothingAndTakesTheProductsTime) {
  const RankRates rates;
  const RankPrediction p = predict(llama(1), rates);
  EXPECT_DOUBLE_EQ(p.flops, 6.0 * 8192 * 4096 * 128256);
  EXPECT_DOUBLE_EQ(p.seconds, p.flops / rates.product_flops_per_s);
  EXPECT_EQ(p.states_bytes + p.dx_wire_bytes + p.node_bytes, 0);
  EXPECT_DOUBLE_EQ(p.efficiency, 1);
  EXPECT_EQ(p.weight_bytes, int64_t{128256} * 4096 * 2);
}

TEST(RankModel, BytesByHand) {
  const RankPrediction p = predict(llama(4), RankRates{});
  EXPECT_EQ(p.vocab_rows, 32064);
  EXPECT_DOUBLE_EQ(p.states_bytes, 3.0 * 8192 * 64);
  // An all-reduce of S bytes sends 2 (R - 1) / R S from each rank.
  EXPECT_NEAR(p.dx_wire_bytes, 2.0 * 3 / 4 * 8192 * 4096 * 4, 1);
  EXPECT_EQ(p.node_bytes, 0);
  RankShape s = llama(4);
  s.sequence_parallel = true;
  const RankPrediction q = predict(s, RankRates{});
  EXPECT_NEAR(q.dx_wire_bytes, 3.0 / 4 * 8192 * 4096 * 4, 1);
  EXPECT_NEAR(q.hidden_wire_bytes, 3.0 / 4 * 8192 * 4096 * 2, 1);
  EXPECT_EQ(q.hidden_bytes, int64_t{8192} / 4 * 4096 * 2);
}

TEST(RankModel, BetweenNodesEachRankSendsItsShare) {
  const RankPrediction p = predict(llama(16, 2), RankRates{});
  const double states = 8192.0 * 64, dx = 8192.0 * 4096 * 4;
  // dX: half of an eighth goes over as the sum is formed, and a sixteenth comes back.
  EXPECT_NEAR(p.node_bytes, states + dx / 8 / 2 + dx / 16, 1);
}

TEST(RankModel, WireIsHiddenOnlyBehindDw) {
  RankRates slow;
  slow.link_bytes_per_s = 1e9;
  RankShape beside = llama(2);
  beside.dx_beside_dw = true;
  const RankPrediction p = predict(beside, slow);
  EXPECT_NEAR(p.dx_exposed_s, p.dx_s - p.products_s / 3, 1e-12);
  EXPECT_LT(p.efficiency, 0.5);
  EXPECT_EQ(predict(beside, RankRates{}).dx_exposed_s, 0);
  const RankPrediction q = predict(llama(2), RankRates{});
  EXPECT_DOUBLE_EQ(q.dx_exposed_s, q.dx_s);
  EXPECT_LT(q.efficiency, predict(beside, RankRates{}).efficiency);
}

TEST(RankModel, FourThousandRanks) {
  for (int64_t ranks = 1; ranks <= 4096; ranks *= 2) {
    const RankPrediction p = predict(llama(ranks, std::max<int64_t>(1, ranks / 8)), RankRates{});
    EXPECT_GT(p.seconds, 0);
    EXPECT_GT(p.efficiency, 0);
    EXPECT_LE(p.efficiency, 1);
    EXPECT_LE(p.memory_bytes, predict(llama(1), RankRates{}).memory_bytes);
  }
  expect_error(ErrorKind::usage, {"nodes = 3"}, [] { predict(llama(16, 3), RankRates{}); });
  expect_error(ErrorKind::usage, {"ranks = 0"}, [] { predict(llama(0), RankRates{}); });
}

}  // namespace
}  // namespace talea::lce
