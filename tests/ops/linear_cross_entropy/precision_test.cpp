// What: the precision clauses of the accuracy rule: confident rows, distant targets, fp32 softmax,
// L2.
// Why: these digits are what the project exists for; each was lost by a widely used library.
// Never: measures time.
#include <cmath>

#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/eager.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

// unfused is eager arithmetic on purpose: it rounds logits and subtracts. The clauses that say
// "better than eager" cannot speak of it; there it is held to the elementwise rule alone.
class Precision : public LaneTest {
 protected:
  bool is_eager() const { return is_yardstick_lane(lane()); }
};
TALEA_EVERY_LANE(Precision);

// With an identity as weight, logits are hidden and dx is dz.
Case identity_case(DType dtype, int64_t tokens, int64_t vocab) {
  Case c = plain_case({.tokens = tokens, .hidden = vocab, .vocab = vocab, .dtype = dtype});
  for (int64_t v = 0; v < vocab; ++v)
    for (int64_t i = 0; i < vocab; ++i) c.in.weight.set(v, i, v == i ? 1 : 0);
  c.options.reduction = Reduction::none;
  want_everything(c);
  c.out.dx = Array(DType::f32, {tokens, vocab});
  return c;
}

TEST_P(Precision, ConfidentRowsKeepTheirDigits) {
  constexpr int64_t vocab = 64;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const double wanted[] = {0.9, 0.99, 0.9995, 1 - 1e-6};
    Case c = identity_case(dtype, 4, vocab);
    for (int64_t t = 0; t < 4; ++t) {
      // The target stands above 63 zeros by so much that its probability is about `wanted`.
      const double p = wanted[t];
      for (int64_t v = 0; v < vocab; ++v) c.in.hidden.set(t, v, 0.001L * v);
      c.in.hidden.set(t, c.in.targets.integer(t), std::log((vocab - 1) * p / (1 - p)));
    }
    c = fitted(lane(), c);
    expect_right(c, name_of(dtype));
    if (!accepts(c) || is_eager()) continue;
    const Outcome o = run(c);
    const Answer truth = oracle(c);
    for (int64_t t = 0; t < 4; ++t) {
      const int64_t y = c.in.targets.integer(t);
      const Real dz = truth.dz[static_cast<size_t>(t * vocab + y)];
      const Real error = std::fabs(o.out.dx.get(t, y) - dz) / std::fabs(dz);
      EXPECT_TRUE(error <= 0.01L) << "p = " << wanted[t] << ": dz off by " << double(error);
      const Real loss = truth.loss[static_cast<size_t>(t)];
      EXPECT_TRUE(std::fabs(o.out.loss.get(t) - loss) <= 1e-3L * loss) << "p = " << wanted[t];
    }
  }
}

// Where the target is certain, z-loss is all of the gradient; as a difference of numbers of about 1
// a ten-thousandth of it was lost on lane unfused, and 16 bits then round to the other neighbour.
TEST_P(Precision, ZLossKeepsItsDigitsBesideOne) {
  Case c = identity_case(DType::f32, 64, 1);
  c.options.z_loss = 1e-4;
  for (int64_t t = 0; t < 64; ++t) c.in.hidden.set(t, 0, 0.1L + 0.05L * t);
  c = fitted(lane(), c);
  expect_right(c);
  if (!accepts(c) || c.in.hidden.dtype() != DType::f32) return;
  const Outcome o = run(c);
  const Answer truth = oracle(c);
  for (int64_t t = 0; t < 64; ++t)
    EXPECT_NEAR(double(o.out.dx.get(t, 0) / truth.dx[size_t(t)]), 1, 4e-7) << "row " << t;
}

// log p + entropy of the best word: of two numbers that are nothing beside lse what is left is
// 40 times the one that lse takes with it. The loss weighs nothing here, so that no other term
// hides it.
TEST_P(Precision, EntropyOfConfidentRowsKeepsItsGradient) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Case c = identity_case(dtype, 4, 16);
    c.in.token_weight = c.in.upstream_entropy = Array(DType::f32, {4});
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t v = 0; v < 16; ++v) c.in.hidden.set(t, v, v == 5 ? 40 : v % 3);
      c.in.targets.set_integer(t, 0, t % 2 ? 5 : 3);
      c.in.token_weight.set(t, 0, 0);
      c.in.upstream_entropy.set(t, 0, t < 2 ? 0.75 : -2.0);
    }
    expect_right(c, name_of(dtype));
  }
}

// A lane that scales rows into the range of fp16 must not take its scale from a row of zeros.
TEST_P(Precision, RowsOfWeightZeroLeaveTheOthersTheirDigits) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Case c = plain_case({.tokens = 256, .hidden = 16, .vocab = 96, .dtype = dtype});
    want_everything(c);
    c.in.token_weight = Array(DType::f32, {256});
    for (int64_t t = 0; t < 256; ++t) c.in.token_weight.set(t, 0, t % 3 == 0 ? 0 : 1);
    expect_right(c);
  }
}

TEST_P(Precision, TargetsTwoHundredNatsBelow) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case c = identity_case(dtype, 3, 40);
    for (int64_t t = 0; t < 3; ++t) {
      const int64_t y = c.in.targets.integer(t);
      c.in.hidden.set(t, (y + 1) % 40, 100);
      c.in.hidden.set(t, y, -100);
    }
    expect_right(c);
    if (!accepts(c)) continue;
    const Outcome o = run(c);
    for (int64_t t = 0; t < 3; ++t) {
      EXPECT_NEAR(static_cast<double>(o.out.loss.get(t)), 200, 1e-3);  // not capped (B22)
      EXPECT_NEAR(static_cast<double>(o.out.dx.get(t, c.in.targets.integer(t))), -1, 1e-6);
    }
  }
}

// A loss formed from rounded logits has an rms error of 2^-9 |z|; an fp32 softmax far less.
TEST_P(Precision, SixteenBitInputsSeeAnFp32Softmax) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Case c = plain_case({.tokens = 192, .hidden = 64, .vocab = 300, .dtype = dtype, .spread = 3.0});
    c.options.reduction = Reduction::none;
    want_everything(c);
    c.out.dx = c.out.dw = Array();
    expect_right(c, name_of(dtype));
    if (!accepts(c)) continue;
    const Outcome o = run(c);
    const Yardsticks y = yardsticks(c);
    const auto rms = [&](auto value) {
      Real sum = 0;
      for (int64_t t = 0; t < 192; ++t) {
        const Real error = value(t) - y.truth.loss[static_cast<size_t>(t)];
        sum += error * error;
      }
      return std::sqrt(sum / 192);
    };
    const Real ours = rms([&](int64_t t) { return o.out.loss.get(t); });
    const Real rounded_logits = rms([&](int64_t t) { return y.eager[0].loss[size_t(t)]; });
    EXPECT_TRUE(ours <= (is_eager() ? 1.01L * rounded_logits : rounded_logits / 4))
        << name_of(dtype) << ": ours " << double(ours) << ", rounded " << double(rounded_logits);
  }
}

// Tensors large enough that the relative L2 rule grants no luck of rounding (compare.cpp).
TEST_P(Precision, RelativeL2IsNoWorseThanEagers) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const double spread : {0.5, 4.0})
      for (const int64_t limit : {int64_t{0}, int64_t{1} << 26}) {
        Case c = plain_case(
            {.tokens = 80, .hidden = 56, .vocab = 257, .dtype = dtype, .spread = spread});
        c.options.workspace_limit_bytes = limit;
        expect_right(c, name_of(dtype));
        c.out.dw = Array(DType::f32, {257, 56});
        expect_right(c, "fp32 dW");
      }
}

// dW over many rows of one sign: a 16-bit accumulator stops growing (B6).
TEST_P(Precision, ManyRowsIntoOneWeightGradient) {
  Case c = plain_case({.tokens = 3000, .hidden = 2, .vocab = 3, .dtype = DType::bf16});
  c.options.reduction = Reduction::sum;
  c.options.workspace_limit_bytes = 0;  // as many chunks as the lane makes
  for (int64_t t = 0; t < 3000; ++t) {
    c.in.hidden.set(t, 0, 1);
    c.in.targets.set_integer(t, 0, 0);
  }
  want_everything(c);
  c.out.dw = Array(DType::f32, {3, 2});
  expect_right(c);
}

}  // namespace
}  // namespace talea::testing
