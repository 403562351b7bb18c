// What: what roundings excuse in the comparison: no less, and not a tenth more.
// Why: a right result is off by luck now and then; a bound that luck cannot meet would be widened.
// Never: runs a lane.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/eager.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

// 8,000 elements in bf16, eager twice as near: eight of them are all but everything, or none is.
TEST(Compare, LuckIsGrantedByWhatTheTensorConsistsOf) {
  for (const bool few : {true, false}) {
    Array ours(DType::bf16, {1000, 8});
    std::vector<Real> truth(8000), eager(8000);
    for (int64_t k = 0; k < 8000; ++k) {
      const Real size = few && k >= 8 ? 1e-4L : 1 + 1.0L / (k % 61 + 2);
      truth[size_t(k)] = size;
      ours.set(k / 8, k % 8, size);
      eager[size_t(k)] = size + (ours.get(k / 8, k % 8) - size) / 1.2L;
    }
    Rule rule;
    rule.e = 1;  // the rule for single elements is not asked here
    rule.l2_times = 1;
    const std::string said = compare("dw", ours, truth, {&eager}, rule);
    EXPECT_EQ(said.empty(), few) << said;
  }
}

// bf16, all rows of the weight alike: what is left of dX is the luck of the one rounding of each
// logit's gradient. Who rounds them to 16 bits has nine tenths of the worst; who does not has none.
TEST(JudgedOnce, EqualRowsRoundAlike) {
  Case c = plain_case({.tokens = 2, .hidden = 3, .vocab = 600, .dtype = DType::bf16});
  for (int64_t v = 0; v < 600; ++v)
    for (int64_t i = 0; i < 3; ++i) c.in.weight.set(v, i, 1 + 0.25 * double(i));
  want_everything(c);
  const Yardsticks y = yardsticks(c);
  ASSERT_TRUE(y.truth.rows_alike);
  Real worst = 0, eager = 0;
  for (int64_t v = 0; v < 600; ++v) worst += half_step(DType::bf16, y.truth.sizes[size_t(v)]);
  for (const Answer& other : y.eager)
    for (size_t k = 0; k < 6; ++k) eager = std::max(eager, std::fabs(other.dx[k] - y.truth.dx[k]));
  CaseOutputs only;
  only.dx = Array(DType::f32, {2, 3});
  const Used lanes = used_by_products;  // what this test plants is no lane's need
  for (const Real share : {0.9L, 1.2L}) {
    for (int64_t t = 0; t < 2; ++t)
      for (int64_t i = 0; i < 3; ++i) only.dx.set(t, i, y.truth.dx[size_t(3 * t + i)]);
    only.dx.set(0, 0, y.truth.dx[0] + share * (2 * eager + floor_share * worst));
    EXPECT_EQ(judge(c, only, y, Standing::one_term).empty(), share < 1) << double(share);
    EXPECT_NE(judge(c, only, y, Standing::product), "") << double(share);
  }
  used_by_products = lanes;
}

// A gradient of few large gradients of logits: 1.2 of eager's L2 is luck there for who rounds those
// once, and is none in a tensor of many: dW of one token or 40, dX of two words or 300.
TEST(JudgedOnce, LuckOfFewTermsAveragesOut) {
  struct Size {
    const char* name;
    int tokens, vocab;
    bool lucky;
  };
  for (const Size& s : {Size{"dw", 1, 300, true}, Size{"dw", 40, 300, false},
                        Size{"dx", 3, 2, true}, Size{"dx", 200, 300, false}}) {
    const int d = s.name == std::string("dw") ? 8 : 64;
    Case c = plain_case({.tokens = s.tokens, .hidden = d, .vocab = s.vocab, .dtype = DType::bf16});
    want_everything(c);
    const Yardsticks y = yardsticks(c);
    const bool of_words = s.name == std::string("dw");
    const Answer &eager = y.eager[0], &truth = y.truth;
    CaseOutputs only;
    Array& a = of_words ? only.dw : only.dx;
    a = Array(DType::f32, {of_words ? s.vocab : s.tokens, d});
    for (int64_t k = 0; k < a.elements(); ++k) {
      const Real right = (of_words ? truth.dw : truth.dx)[size_t(k)];
      a.set(k / d, k % d, right + 1.2L * ((of_words ? eager.dw : eager.dx)[size_t(k)] - right));
    }
    EXPECT_NE(judge(c, only, y, Standing::product), "") << s.name << s.tokens;
    EXPECT_EQ(judge(c, only, y, Standing::one_term).empty(), s.lucky) << s.name << s.tokens;
  }
}

// An element of few terms may be off by what their roundings bring, where eager arithmetic happened
// to be exact: for who rounds each logit's gradient once, and for nobody else.
TEST(JudgedOnce, AnElementMayBeOffByItsRoundings) {
  Case c = plain_case({.tokens = 2, .hidden = 3, .vocab = 600, .dtype = DType::bf16});
  want_everything(c);
  Yardsticks y = yardsticks(c);
  for (Answer& other : y.eager) other.db = y.truth.db;
  Real largest = 0;
  for (const Real x : y.truth.db) largest = std::max(largest, std::fabs(x));
  const auto v = size_t(c.in.targets.integer(0));
  const Real terms = 0x1p-8L * (y.truth.sizes[v] + y.truth.sizes[600 + v]);
  const Used lanes = used_by_products;
  for (const Real share : {0.9L, 1.1L}) {
    CaseOutputs only;
    only.db = Array(DType::f32, {600});
    for (int64_t k = 0; k < 600; ++k) only.db.set(k, 0, y.truth.db[size_t(k)]);
    only.db.set(int64_t(v), 0, y.truth.db[v] + share * (terms + 1e-4L * largest));
    EXPECT_EQ(judge(c, only, y, Standing::one_term).empty(), share < 1) << double(share);
    EXPECT_NE(judge(c, only, y, Standing::product), "") << double(share);
  }
  used_by_products = lanes;
}

// The same of dW in bf16, whose terms may be rounded twice: an element that is all but one of them.
// In fp16 none is.
TEST(JudgedOnce, AnElementOfDwMayBeRoundedTwice) {
  const Used lanes = used_by_products;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Case c = plain_case({.tokens = 1, .hidden = 3, .vocab = 600, .dtype = dtype});
    want_everything(c);
    Yardsticks y = yardsticks(c);
    for (Answer& other : y.eager) other.dw = y.truth.dw;
    Real largest = 0;
    for (const Real x : y.truth.dw) largest = std::max(largest, std::fabs(x));
    const auto v = size_t(c.in.targets.integer(0));
    const Real size = y.truth.sizes[v] * std::fabs(Real(c.in.hidden.get(0, 1)));
    const Real terms = dtype == DType::bf16 ? 2 * 0x1p-8L * size : 0x1p-11L * size;
    for (const Real share : {0.9L, 1.1L}) {
      CaseOutputs only;
      only.dw = Array(DType::f32, {600, 3});
      for (int64_t k = 0; k < 1800; ++k) only.dw.set(k / 3, k % 3, y.truth.dw[size_t(k)]);
      only.dw.set(int64_t(v), 1, y.truth.dw[3 * v + 1] + share * (terms + 1e-4L * largest));
      const std::string said = judge(c, only, y, Standing::one_term);
      EXPECT_EQ(said.find("dw[") == std::string::npos, share < 1) << double(share) << said;
      EXPECT_NE(judge(c, only, y, Standing::product), "") << double(share);
    }
  }
  used_by_products = lanes;
}

// Three equal rows of hidden: dW is one row times 900 numbers, so few roundings make it up. Who
// rounds no more than small gradients of logits gets five deviations of those, and none of the
// large ones.
TEST(JudgedOnce, SmallTermsAreLuckyLargeOnesAreNot) {
  Case c = plain_case({.tokens = 3, .hidden = 4, .vocab = 300, .dtype = DType::bf16});
  for (int64_t t = 1; t < 3; ++t)
    for (int64_t i = 0; i < 4; ++i) c.in.hidden.set(t, i, c.in.hidden.get(0, i));
  want_everything(c);
  Yardsticks y = yardsticks(c);
  const Answer& truth = y.truth;
  Real sum[3] = {}, row = 0, most = 0, variance = 0, floor = 0;
  for (size_t k = 0; k < 900; ++k) sum[k / 300] += truth.factors[k];
  for (int64_t i = 0; i < 4; ++i) row += c.in.hidden.get(0, i) * c.in.hidden.get(0, i);
  int large = 0;
  for (size_t v = 0; v < 300; ++v) {
    Real worst = 0, squares = 0, fourths = 0;
    for (size_t t = 0; t < 3; ++t) {
      const Real size = truth.factors[300 * t + v];
      if (size > sum[t] / 64) ++large;
      const Real half = size > sum[t] / 64 ? Real(0) : half_step(DType::bf16, size);
      worst += half, squares += half * half, fourths += half * half * half * half;
    }
    most += worst * worst * row;
    variance += ((4.0L / 45 - 2.0L / 9) * fourths + 2.0L / 9 * squares * squares) * row * row;
  }
  ASSERT_GE(large, 3);  // the rows' targets
  const Real luck = std::min(most, 5 * std::sqrt(2 * variance));
  for (const Real x : truth.dw_floor) floor += 0x1p-48L * x * x;
  for (Answer& other : y.eager) other.dw = truth.dw;
  const auto v = size_t(c.in.targets.integer(0));
  Real largest = 0;
  for (const Real x : truth.dw) largest = std::max(largest, std::fabs(x));
  const Used lanes = used_by_products;
  for (const Real share : {0.97L, 1.03L}) {
    // Spread over all elements: none of them is off by as much as it may be.
    CaseOutputs only;
    only.dw = Array(DType::f64, {300, 4});
    const Real each = share * (std::sqrt(luck) + std::sqrt(floor)) / std::sqrt(Real(1200));
    for (int64_t k = 0; k < 1200; ++k)
      only.dw.set(k / 4, k % 4, truth.dw[size_t(k)] + (k % 2 ? each : -each));
    for (Answer& other : y.eager) other.dw[0] = truth.dw[0] + each;  // and nobody asks of one
    const Real yard = each * each, room = std::sqrt(yard + luck) + std::sqrt(floor);
    const bool inside = each * std::sqrt(Real(1200)) <= room;
    EXPECT_EQ(inside, share < 1);
    EXPECT_EQ(judge(c, only, y, Standing::small_terms).empty(), inside) << double(share);
    EXPECT_NE(judge(c, only, y, Standing::product), "") << double(share);
    for (Answer& other : y.eager) other.dw = truth.dw;
  }
  // One rounding of the target's gradient, which is large: not granted.
  CaseOutputs only;
  only.dw = Array(DType::f64, {300, 4});
  for (int64_t k = 0; k < 1200; ++k) only.dw.set(k / 4, k % 4, truth.dw[size_t(k)]);
  only.dw.set(
      int64_t(v), 1,
      truth.dw[4 * v + 1] + 2e-4L * largest +
          0.9L * half_step(DType::bf16, truth.factors[v]) * std::fabs(Real(c.in.hidden.get(0, 1))));
  EXPECT_EQ(judge(c, only, y, Standing::one_term).find("dw["), std::string::npos);
  EXPECT_NE(judge(c, only, y, Standing::small_terms).find("dw["), std::string::npos);
  // db sums what is not rounded.
  only = CaseOutputs();
  only.db = Array(DType::f64, {300});
  for (int64_t k = 0; k < 300; ++k) only.db.set(k, 0, truth.db[size_t(k)]);
  for (Answer& other : y.eager) other.db = truth.db;
  Real largest_db = 0, halves = 0;
  for (const Real x : truth.db) largest_db = std::max(largest_db, std::fabs(x));
  for (size_t t = 0; t < 3; ++t) halves += half_step(DType::bf16, truth.factors[300 * t + 1]);
  only.db.set(1, 0, truth.db[1] + 1.1e-4L * largest_db + halves);
  EXPECT_NE(judge(c, only, y, Standing::small_terms), "");
  used_by_products = lanes;
}

// fp32, a scaled logit of 140 that is all of its row: what one sum of its terms leaves is common to
// the whole row. Nine tenths of five deviations pass, a tenth more than they do not.
TEST(JudgedWalk, RoundingsOfALargeLogitMoveItsRow) {
  Case c = plain_case({.tokens = 1, .hidden = 13, .vocab = 5});
  c.options.logit_scale = -1.25;
  const int64_t target = c.in.targets.integer(0);
  for (int64_t i = 0; i < 13; ++i) {
    c.in.weight.set(target, i, 1 + 0.0625 * double(i % 3));
    c.in.hidden.set(0, i, -8.125);
  }
  want_everything(c);
  Yardsticks y = yardsticks(c);
  const Answer& truth = y.truth;
  for (Answer& other : y.eager) other.dw = truth.dw;
  ASSERT_GT(truth.logits[size_t(target)], 130);
  Real largest = 0;
  for (const Real x : truth.dw) largest = std::max(largest, std::fabs(x));
  const auto k = size_t(13 * target);
  const Real room = floor_share * 0x1p-24L * truth.dw_walk[k];
  EXPECT_GT(room, 2 * (1e-6L * largest + floor_share * 0x1p-24L * truth.dw_floor[k]));
  const Used lanes = used_by_products;
  for (const Real share : {0.9L, 1.1L}) {
    CaseOutputs only;
    only.dw = c.out.dw = Array(DType::f64, {5, 13});
    for (int64_t j = 0; j < 65; ++j) only.dw.set(j / 13, j % 13, truth.dw[size_t(j)]);
    only.dw.set(target, 0, truth.dw[k] + share * room);
    EXPECT_EQ(judge(c, only, y).empty(), share < 1) << double(share);
  }
  used_by_products = lanes;
}

// In an ordinary problem that room is no more than e and the floor were: a factor of 2e-6 fails.
TEST(JudgedWalk, OrdinaryGradientsKeepTheirBound) {
  Case c = make_case({.tokens = 7, .hidden = 33, .vocab = 60});
  want_everything(c);
  const Yardsticks y = yardsticks(c);
  const Used lanes = used_by_products;
  for (const Real factor : {1e-6L, 2e-6L}) {
    CaseOutputs only;
    only.dw = Array(DType::f64, {60, 33});
    for (int64_t k = 0; k < only.dw.elements(); ++k)
      only.dw.set(k / 33, k % 33, y.truth.dw[size_t(k)] * (1 + factor));
    EXPECT_EQ(judge(c, only, y).empty(), factor < 1.5e-6L) << double(factor);
  }
  used_by_products = lanes;
}

// fp32, two words whose logits are what 16 terms leave of each other: top-k's value, lse where
// there is one word, and which of the two comes first.
TEST(JudgedWalk, ALogitMayBeWhatItsTermsLeave) {
  const Used lanes = used_by_products;
  for (const int vocab : {1, 2}) {
    Case c = plain_case({.tokens = 1, .hidden = 16, .vocab = vocab});
    for (int64_t i = 0; i < 16; ++i) {
      c.in.hidden.set(0, i, i % 2 ? 1 : -1);
      for (int64_t v = 0; v < vocab; ++v) c.in.weight.set(v, i, i == 15 ? 1.015625 : 1);
    }
    want_everything(c, 1);
    // 16 squares of 1 spread over the sums on the way: 17 / 6 of them, a third of it each.
    std::vector<Real> x(16), w(16);
    for (int64_t i = 0; i < 16; ++i) x[size_t(i)] = c.in.hidden.get(0, i), w[size_t(i)] = 1;
    w[15] = c.in.weight.get(0, 15);
    const Real walk = logit_walk(c, 0, 0, x.data(), w.data());
    EXPECT_NEAR(double(walk), std::sqrt(16 * 17 / 6.0 / 3), 0.05);
    const Real room = 5 * floor_share * 0x1p-24L * walk;
    for (const Real share : {0.9L, 1.1L}) {
      // In steps of fp32 at 1, where such a sum may lie.
      if (vocab == 2)
        c.in.weight.set(
            1, 15, 1.015625L - std::floor(share * room * std::sqrt(2.0L) * 0x1p23L) * 0x1p-23L);
      Yardsticks y = yardsticks(c);
      for (Answer& other : y.eager) other.lse = y.truth.lse, other.logits = y.truth.logits;
      const Real z = y.truth.logits[0];
      ASSERT_EQ(z, 0.015625L);
      CaseOutputs only;
      if (vocab == 1) {
        only.topk_ids = c.out.topk_ids;
        only.topk_ids.set_integer(0, 0, 0);
        only.topk_values = Array(DType::f64, {1, 1});
        only.topk_values.set(0, 0, z + share * room);
        EXPECT_EQ(judge(c, only, y).empty(), share < 1) << double(share);
        only = CaseOutputs();
        only.lse = Array(DType::f64, {1});
        only.lse.set(0, 0, z + share * room);
      } else {
        only.argmax = c.out.argmax;
        only.argmax.set_integer(0, 0, 1);
      }
      EXPECT_EQ(judge(c, only, y).empty(), share < 1) << double(share) << " of " << vocab;
    }
  }
  used_by_products = lanes;
}

}  // namespace
}  // namespace talea::testing
