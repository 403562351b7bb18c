// What: selection and index loss on every lane: dtypes, bounds, ties, odd scores, empty rows.
// Why: a selector that is nearly right trains a model on other keys every run.
// Never: judges a selection by recall alone.
#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/lanes.hpp"
#include "yardsticks/sparse_attention/index_case.hpp"

namespace talea::testing {
namespace {

class AttentionSelect : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string why;
    place_ = place_of_attention(GetParam(), why);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  // Lanes of a device multiply columns in eights, sm90 not in fp32.
  IndexCase make(IndexSpec s) const {
    if (place_) s.dim = (s.dim + 7) / 8 * 8;
    if (GetParam() == "sm90" && s.dtype == DType::f32) s.dtype = DType::bf16;
    return make_index_case(s);
  }
  Selected run(const IndexCase& c, int threads = 0) {
    return run_select(c, GetParam(), threads, place_);
  }
  std::string judged(const IndexCase& c) {
    return judge_selection(c, run(c), GetParam() == "sm90" && c.q.dtype() == DType::f8_e4m3);
  }
  // One query whose scores are given, fp32: one head, weight 1, no activation. In bf16 a score is
  // the sum of three columns.
  IndexCase with_scores(const std::vector<double>& scores, int64_t top_k) const {
    IndexSpec s;
    s.queries = 1, s.heads = 1, s.dim = 1, s.keys = static_cast<int64_t>(scores.size());
    s.top_k = top_k, s.act = sa::Activation::identity;
    IndexCase c = make(s);
    for (int64_t x = 0; x < c.dim(); ++x) c.q.put(x < 3 ? 1 : 0, 0, 0, 0, x);
    c.weights.put(1, 0, 0, 0);
    for (int64_t j = 0; j < s.keys; ++j) {
      double left = scores[static_cast<size_t>(j)];
      for (int64_t x = 0; x < c.dim(); ++x) {
        c.k.put(left, 0, j, x);
        left = std::isfinite(left) ? left - c.k.get(0, j, x) : 0;
      }
    }
    return c;
  }

 private:
  Place* place_ = nullptr;
};
std::vector<std::string> select_lanes() {
  std::vector<std::string> all = device_attention_lanes();
  for (const char* host : {"cpu", "reference"}) all.emplace_back(host);
  return all;
}
TALEA_ATTENTION_ON(AttentionSelect, select_lanes);

TEST_P(AttentionSelect, EveryTypeAndBound) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3})
    for (int bits = 0; bits < 16; ++bits)
      for (const int64_t top_k : {1, 9, 64}) {
        IndexSpec s;
        s.seed = ++seed, s.dtype = dtype, s.top_k = top_k;
        s.causal = bits & 1, s.bounds = bits & 2, s.thd = bits & 4, s.positions = bits & 8;
        s.batch = s.thd ? 1 : 2;
        s.heads = seed % 3 ? 5 : 17, s.key_stride = seed % 2 ? 1 : 3;
        s.act = seed % 5 ? sa::Activation::relu : sa::Activation::identity;
        const IndexCase c = make(s);
        EXPECT_EQ(judged(c), "") << describe(s);
      }
}

std::vector<int64_t> expected(const std::vector<int64_t>& keys, int64_t width) {
  std::vector<int64_t> all = keys;
  all.resize(static_cast<size_t>(width), -1);
  return all;
}

TEST_P(AttentionSelect, TiesGoToTheLowerIndex) {
  EXPECT_EQ(run(with_scores(std::vector<double>(40, 0.5), 7)).indices,
            expected({0, 1, 2, 3, 4, 5, 6}, 7));
  EXPECT_EQ(run(with_scores({1, 3, 2, 3, 2, 2, 0}, 4)).indices, expected({1, 2, 3, 4}, 4));
  EXPECT_EQ(run(with_scores({-0.0, 0.0, -0.0, 0.0}, 2)).indices, expected({0, 1}, 2));
}

TEST_P(AttentionSelect, NaNFirstInfinityNeverBelow) {
  const double inf = INFINITY;
  const Selected s = run(with_scores({1, NAN, -inf, inf, 2, NAN}, 3));
  EXPECT_EQ(s.indices, expected({1, 3, 5}, 3));
  EXPECT_EQ(s.result.nan_scores, 2);
  const Selected few = run(with_scores({-inf, 1, -inf}, 3));
  EXPECT_EQ(few.indices, expected({1}, 3));
  EXPECT_EQ(few.length[0], 1);
  EXPECT_EQ(few.scores[2], -inf);
}

TEST_P(AttentionSelect, ScoresBeyondHalfAndOneUlpApart) {
  // The least of those beyond 65504 stands first: where all were equal there, it would be taken.
  EXPECT_EQ(run(with_scores({6.6e4, 1e30, -1e30, 7e4, 2e30}, 3)).indices, expected({1, 3, 4}, 3));
  const double one = 1, next = std::nextafter(1.0f, 2.0f);
  EXPECT_EQ(run(with_scores({one, next, one, next, one}, 2)).indices, expected({1, 3}, 2));
}

TEST_P(AttentionSelect, ManyEqualAtTheBorder) {
  std::vector<double> scores(100000, 0.25);
  scores[70000] = 1;
  const Selected s = run(with_scores(scores, 50));
  std::vector<int64_t> want;
  for (int64_t j = 0; j < 49; ++j) want.push_back(j);
  want.push_back(70000);
  EXPECT_EQ(s.indices, want);
}

TEST_P(AttentionSelect, LongRows) {
  IndexSpec s;
  s.keys = 1500, s.top_k = 100, s.queries = 2;
  const IndexCase c = make(s);
  EXPECT_EQ(judged(c), "");
}

// Rows that a block holds and longer ones; few and most of their keys; heads in one tile and more.
TEST_P(AttentionSelect, EveryWayThroughARow) {
  uint64_t seed = 40;
  for (const int64_t keys : {4200, 9001, 33000})
    for (const int64_t top_k : {int64_t{60}, int64_t{2048}, keys - 20}) {
      IndexSpec s;
      s.seed = ++seed, s.keys = keys, s.top_k = std::min<int64_t>(top_k, 8192), s.queries = 2;
      s.bounds = seed % 2, s.dim = 8, s.heads = 3;
      const IndexCase c = make(s);
      EXPECT_EQ(judged(c), "") << describe(s);
    }
  for (const DType dtype : {DType::f32, DType::f8_e4m3})
    for (const int64_t heads : {16, 32, 64, 100})
      for (const int64_t dim : {64, 72, 128}) {
        IndexSpec s;
        s.seed = ++seed, s.heads = heads, s.dim = dim, s.keys = 150, s.queries = 19;
        s.causal = seed % 2, s.dtype = dtype;
        const IndexCase c = make(s);
        EXPECT_EQ(judged(c), "") << describe(s);
      }
}

// So many that short ones share a multiprocessor.
TEST_P(AttentionSelect, ManyCausalRows) {
  for (const int64_t base : {0, 8100, 16300}) {
    IndexSpec s;
    s.seed = 70 + static_cast<uint64_t>(base), s.queries = 300, s.keys = 300 + base;
    s.heads = 2, s.dim = 8, s.top_k = 70, s.causal = true;
    IndexCase c = make(s);
    c.options.q_position_base = base;
    EXPECT_EQ(judged(c), "") << describe(s);
  }
}

TEST_P(AttentionSelect, NothingToSelect) {
  IndexSpec s;
  s.keys = 0, s.top_k = 3;
  IndexCase c = make(s);
  EXPECT_EQ(judged(c), "");
  s.keys = 4, s.top_k = 0;
  c = make(s);
  EXPECT_EQ(judged(c), "");
}

TEST_P(AttentionSelect, AnyNumberOfThreads) {
  IndexSpec s;
  s.queries = 13, s.keys = 301, s.heads = 9, s.top_k = 40;
  const IndexCase c = make(s);
  const Selected one = run(c, 1);
  for (const int threads : {2, 3, 16}) {
    const Selected many = run(c, threads);
    EXPECT_EQ(many.indices, one.indices);
    EXPECT_EQ(many.scores, one.scores);
  }
}

class AttentionIndexLoss : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string why;
    place_ = place_of_attention(GetParam(), why);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  LossOutcome run(const IndexCase& c) { return run_loss(c, GetParam(), 0, place_); }
  bool on_device() const { return place_ != nullptr; }

 private:
  Place* place_ = nullptr;
};
std::vector<std::string> loss_lanes() {
  std::vector<std::string> all = {"auto", "reference"};
  for (const std::string& lane : device_attention_lanes())
    if (lane != "sm90") all.push_back(lane);  // it declines the pass
  return all;
}
TALEA_ATTENTION_ON(AttentionIndexLoss, loss_lanes);

TEST_P(AttentionIndexLoss, EveryOption) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8_e4m3})
    for (int bits = 0; bits < 32; ++bits) {
      IndexSpec s;
      s.seed = ++seed, s.loss = true, s.dtype = dtype;
      s.dense = bits & 1, s.causal = bits & 2, s.row_weight = bits & 4, s.given = bits & 8;
      s.act = bits & 16 ? sa::Activation::identity : sa::Activation::relu;
      s.bounds = s.dense && seed % 2, s.thd = s.dense && seed % 3 == 0, s.batch = s.thd ? 1 : 2;
      const IndexCase c = make_index_case(s);
      const LossOutcome o = run(c);
      EXPECT_EQ(o.damage + judge_loss(c, o), "") << describe(s);
    }
}

TEST_P(AttentionIndexLoss, AnyWorkspaceLimit) {
  if (!on_device()) GTEST_SKIP() << "a host lane's chunk does not follow the limit";
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const bool dense : {false, true}) {
      IndexSpec s;
      s.loss = true, s.dense = s.causal = dense, s.dtype = dtype;
      s.queries = 40, s.keys = 300, s.heads = 16, s.dim = 64, s.top_k = 64;
      IndexCase c = make_index_case(s);
      const LossOutcome all = run(c);
      EXPECT_EQ(all.damage + judge_loss(c, all), "") << describe(s);
      for (const int64_t kib : {300, 700, 2000}) {
        c.loss.workspace_limit_bytes = (int64_t{4} << 20) + (kib << 10);
        const LossOutcome some = run(c);
        EXPECT_LE(some.result.workspace_bytes, c.loss.workspace_limit_bytes);
        EXPECT_EQ(some.loss, all.loss);
        EXPECT_EQ(some.dq, all.dq);
        EXPECT_EQ(some.dk, all.dk);
        EXPECT_EQ(some.dw, all.dw);
      }
    }
}

TEST_P(AttentionIndexLoss, FiniteAtItsEdges) {
  IndexSpec s;
  s.loss = true, s.dense = true, s.row_weight = true;
  IndexCase c = make_index_case(s);
  for (int64_t j = 0; j < c.keys(); ++j)  // p underflows, and so do teachers
    for (int64_t x = 0; x < c.dim(); ++x) c.k.put(j == 0 ? 300 : -300, 0, j, x);
  for (int64_t x = 0; x < 16; ++x) c.kv.put(400, 0, 1, 0, x);
  LossOutcome o = run(c);
  EXPECT_TRUE(std::isfinite(o.loss));
  for (const double x : o.dq) EXPECT_TRUE(std::isfinite(x));
  // One key: the gradient is exactly 0.
  IndexSpec one;
  one.loss = true, one.top_k = 1;
  c = make_index_case(one);
  o = run(c);
  EXPECT_EQ(o.loss, 0);
  for (const auto* g : {&o.dq, &o.dk, &o.dw})
    for (const double x : *g) EXPECT_EQ(x, 0);
}

}  // namespace
}  // namespace talea::testing
