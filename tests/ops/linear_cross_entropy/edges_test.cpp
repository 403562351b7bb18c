// What: the edge rows of the contract's section 3 that concern targets and special values.
// Why: each row is a promise on every lane; several are bugs that others shipped.
// Never: looser than the contract's accuracy rule.
#include <cmath>

#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

constexpr double inf = INFINITY;
constexpr DType working_types[] = {DType::f32, DType::bf16, DType::f16};
// A lane of 16-bit products declines the first: every edge has a case for it, too.
constexpr DType two_types[] = {DType::f32, DType::bf16};

class Edges : public LaneTest {};
TALEA_EVERY_LANE(Edges);

Case none_case(Plain plain) {
  Case c = plain_case(plain);
  c.options.reduction = Reduction::none;
  want_everything(c);
  return c;
}

void spoil_row(Case& c, int64_t t) {
  const Real bad[] = {NAN, inf, -inf};
  for (int64_t i = 0; i < c.hidden(); ++i) c.in.hidden.set(t, i, bad[i % 3]);
}

TEST_P(Edges, IgnoredRowsTakeNoPartEvenWithNaN) {
  for (const DType dtype : working_types)
    for (const int64_t ignore : {int64_t{-100}, int64_t{4}, int64_t{1} << 40}) {
      Case c = none_case({.tokens = 9, .dtype = dtype, .bias = true});
      c.options.ignore_index = ignore;
      for (int64_t t = 0; t < 9; ++t)
        if (c.in.targets.integer(t) == 4) c.in.targets.set_integer(t, 0, 5);
      for (const int64_t t : {0, 3, 4, 8}) c.in.targets.set_integer(t, 0, ignore);
      if (!accepts(c)) continue;
      const Outcome clean = run(c);
      for (const int64_t t : {0, 3, 4, 8}) spoil_row(c, t);
      expect_right(c);
      const Outcome spoiled = run(c);
      EXPECT_EQ(same_bits(clean.out, spoiled.out), "") << "an ignored row leaks";
    }
}

TEST_P(Edges, ForeignTargetsAreErrorsWhenChecked) {
  for (const DType dtype : two_types)
    for (const int64_t y : {int64_t{-1}, int64_t{11}, INT64_MAX, INT64_MIN}) {
      Case c = plain_case({.dtype = dtype});
      c.options.target_check = TargetCheck::checked;
      expect_right(c);
      if (!accepts(c)) continue;
      c.in.targets.set_integer(3, 0, y);
      try {
        run(c);
        ADD_FAILURE() << "target " << y << " was taken";
      } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("targets[3]"), std::string::npos) << text;
        EXPECT_NE(text.find(std::to_string(y)), std::string::npos) << text;
        EXPECT_EQ(error.kind(), ErrorKind::invalid_data);
      }
    }
}

TEST_P(Edges, ForeignTargetsPoisonTheirRowOnly) {
  for (const auto& [reduction, dtype] : {std::pair(Reduction::none, DType::f32),
                                         {Reduction::sum, DType::f32},
                                         {Reduction::mean, DType::f32},
                                         {Reduction::none, DType::bf16},
                                         {Reduction::mean, DType::bf16}})
    for (const int64_t y : {int64_t{-1}, int64_t{11}, int64_t{13}, INT64_MAX, INT64_MIN}) {
      Case c = plain_case({.vocab = 14, .dtype = dtype, .bias = true});
      c.options.vocab = 11;  // 11 .. 13 are padded rows: foreign all the same (B8)
      for (int64_t t = 0; t < 7; ++t) c.in.targets.set_integer(t, 0, t);
      c.options.reduction = reduction;
      c.options.target_check = TargetCheck::poison;
      want_everything(c);
      c.in.targets.set_integer(2, 0, y);
      c.in.targets.set_integer(4, 0, -100);
      expect_right(c);
      if (!accepts(c)) continue;
      const LinearCrossEntropyResult r = run(c).result;
      // On a device the counts are read later (tests/gpu/manners.cpp).
      const bool later = is_device_lane(lane()) && r.out_of_range_tokens == -1;
      EXPECT_EQ(r.out_of_range_tokens, later ? -1 : 1);
      EXPECT_EQ(r.ignored_tokens, later ? -1 : 1);
      EXPECT_EQ(r.valid_tokens, later ? -1 : 5);
    }
}

TEST_P(Edges, NaNRowLeavesTheOthersBitIdentical) {
  for (const DType dtype : working_types) {
    Case c = none_case({.tokens = 8, .hidden = 6, .vocab = 21, .dtype = dtype});
    if (!accepts(c)) continue;
    const Outcome clean = run(c);
    Case spoiled = c;
    spoiled.in.hidden.set(5, 2, NAN);
    expect_right(spoiled);
    const Outcome o = run(spoiled);
    for (int64_t t = 0; t < 8; ++t) {
      if (t == 5) {
        EXPECT_TRUE(std::isnan(o.out.loss.get(t)) && std::isnan(o.out.dx.get(t, 0)));
        EXPECT_EQ(o.out.argmax.integer(t), -1);
        continue;
      }
      EXPECT_EQ(o.out.loss.get(t), clean.out.loss.get(t));
      EXPECT_EQ(o.out.entropy.get(t), clean.out.entropy.get(t));
      for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(o.out.dx.get(t, i), clean.out.dx.get(t, i));
    }
  }
}

// Infinities enter through the bias: column v of every row.
TEST_P(Edges, InfiniteLogits) {
  for (const auto& [vocab, dtype] : {std::pair<int64_t, DType>{11, DType::f32},
                                     {600, DType::f32},
                                     {11, DType::bf16},
                                     {600, DType::bf16}}) {
    const Plain plain{.tokens = 3, .vocab = vocab, .dtype = dtype, .bias = true};
    if (!accepts(none_case(plain))) continue;
    const auto with = [&](std::vector<std::pair<int64_t, double>> logits, int64_t target) {
      Case c = none_case(plain);
      for (const auto& [v, b] : logits) c.in.bias.set(v, 0, b);
      for (int64_t t = 0; t < 3; ++t) c.in.targets.set_integer(t, 0, target);
      expect_right(c);
      return run(c);
    };
    EXPECT_TRUE(std::isnan(with({{2, inf}}, 0).out.loss.get(0)));
    EXPECT_TRUE(std::isfinite(with({{2, -inf}}, 0).out.loss.get(0)));
    EXPECT_EQ(with({{2, -inf}}, 2).out.loss.get(0), inf);
    std::vector<std::pair<int64_t, double>> all, head, tail;
    for (int64_t v = 0; v < vocab; ++v) all.emplace_back(v, -inf);
    for (int64_t v = 0; v < vocab - 1; ++v) head.emplace_back(v, -inf);
    for (int64_t v = 1; v < vocab; ++v) tail.emplace_back(v, -inf);
    EXPECT_TRUE(std::isnan(with(all, 0).out.loss.get(0)));
    EXPECT_TRUE(std::isfinite(with(head, vocab - 1).out.loss.get(0)));  // -inf against -inf
    EXPECT_TRUE(std::isfinite(with(tail, 0).out.loss.get(0)));
    EXPECT_EQ(with(head, 1).out.loss.get(0), inf);
  }
}

TEST_P(Edges, VeryNegativeRows) {
  for (const DType dtype : two_types)
    for (const double shift : {-95.0, -150.0, -1e4}) {
      Case c = none_case({.tokens = 5, .vocab = 300, .dtype = dtype, .bias = true});
      for (int64_t v = 0; v < 300; ++v) c.in.bias.set(v, 0, c.in.bias.get(v) + shift);
      expect_right(c, name_of(dtype) + std::string(", shift ") + std::to_string(shift));
    }
}

TEST_P(Edges, LogitsUpToTheEndOfFp32) {
  const double rows[][4] = {{3e38, 2.9e38, 1e38, -0.3e38},
                            {-3e38, -2.9e38, -3.3e38, -1e38},
                            {3e38, 3e38, 1, 0},
                            {-3.3e38, -3.3e38, -3.3e38, -3.3e38}};
  for (const auto& row : rows)
    for (int64_t k = 0; k < 8; ++k) {
      const int64_t y = k % 4;
      Case c = none_case({.tokens = 1, .hidden = 1, .vocab = 4, .dtype = two_types[k / 4]});
      c.in.hidden.set(0, 0, 1);
      for (int64_t v = 0; v < 4; ++v) c.in.weight.set(v, 0, row[v]);
      c.in.targets.set_integer(0, 0, y);
      c.out.dx = Array();  // a difference of two such weights is beyond fp32 in the truth as well
      expect_right(c);
    }
}

// What was summed before the rise must vanish, its distances to the maximum included: they are what
// the entropy is made of.
TEST_P(Edges, RowsThatRiseBeyondTheRangeOfExp) {
  constexpr int64_t vocab = 20000;
  for (const DType dtype : working_types) {
    Case c = plain_case({.tokens = 3, .hidden = 1, .vocab = vocab, .dtype = dtype});
    c.options.reduction = Reduction::none;
    want_everything(c);
    for (int64_t t = 0; t < 3; ++t) c.in.hidden.set(t, 0, 1);
    for (int64_t v = 0; v < vocab; ++v)
      c.in.weight.set(v, 0, v < vocab / 2 ? -240 + v % 7 : v % 5);  // exact in 16 bits
    expect_right(c);
  }
}

TEST_P(Edges, NothingCounted) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean})
    for (const OnEmpty on_empty : {OnEmpty::nan, OnEmpty::zero})
      for (const auto& [tokens, dtype] :
           {std::pair<int64_t, DType>{0, DType::f32}, {5, DType::f32}, {5, DType::bf16}}) {
        Case c = plain_case({.tokens = tokens, .dtype = dtype, .bias = true});
        for (int64_t t = 0; t < tokens; ++t) c.in.targets.set_integer(t, 0, -100);
        c.options.reduction = reduction;
        c.options.on_empty = on_empty;
        want_everything(c, 2);
        expect_right(c);
        if (!accepts(c)) continue;
        const Outcome o = run(c);
        for (int64_t v = 0; v < 11; ++v) EXPECT_EQ(o.out.db.get(v), 0);
        if (reduction == Reduction::none) continue;
        const double loss = static_cast<double>(o.out.loss.get());
        if (reduction == Reduction::mean && on_empty == OnEmpty::nan)
          EXPECT_TRUE(std::isnan(loss));
        else
          EXPECT_EQ(loss, 0);
      }
}

TEST_P(Edges, ClassWeightsThatSumToZero) {
  for (const auto& [reduction, dtype] : {std::pair(Reduction::sum, DType::f32),
                                         {Reduction::mean, DType::f32},
                                         {Reduction::sum, DType::bf16},
                                         {Reduction::mean, DType::bf16}}) {
    Case c = plain_case({.dtype = dtype});
    c.in.class_weight = Array(DType::f32, {11});
    for (int64_t v = 0; v < 11; ++v) c.in.class_weight.set(v, 0, 0);
    c.options.reduction = reduction;
    want_everything(c);
    c.out.dx = c.out.dw = Array();
    expect_right(c);
    if (accepts(c)) {
      EXPECT_EQ(std::isnan(run(c).out.loss.get()), reduction == Reduction::mean);
    }
  }
}

TEST_P(Edges, VocabularyOfOneAndHiddenOfNone) {
  for (const DType dtype : working_types) {
    Case one = none_case({.vocab = 1, .dtype = dtype, .bias = true});
    expect_right(one);
    if (accepts(one)) {
      const Outcome o = run(one);
      for (int64_t t = 0; t < 7; ++t) EXPECT_EQ(o.out.loss.get(t), 0);
      for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(o.out.dx.get(0, i), 0);
      for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(o.out.dw.get(0, i), 0);
      EXPECT_EQ(o.out.db.get(0), 0);
    }
    Case flat = none_case({.hidden = 0, .dtype = dtype});
    expect_right(flat);
    if (accepts(flat)) {
      EXPECT_NEAR(static_cast<double>(run(flat).out.loss.get(0)), std::log(11.0), 1e-6);
    }
  }
}

// Whatever the target, the one entry has probability 1: terms that only cancel would leave dust.
TEST_P(Edges, VocabularyOfOneUnderEveryOption) {
  for (const DType dtype : two_types)
    for (const Soft soft : {Soft::none, Soft::dense, Soft::sparse}) {
      Spec spec;
      spec.tokens = 9, spec.hidden = 5, spec.vocab = 1, spec.padding = 3, spec.soft = soft;
      spec.types = dtype == DType::f32 ? Types::f32 : Types::bf16_f32;
      spec.reduction = Reduction::mean;
      spec.bias = spec.bias_f32 = spec.class_weight = spec.token_weight = true;
      spec.upstream = Upstream::contiguous;
      spec.upstream_entropy = true;
      spec.label_smoothing = 0.1, spec.logit_scale = -1.25, spec.softcap = 5;
      const Case c = make_case(spec);
      expect_right(c);
      if (!accepts(c) || is_yardstick_lane(lane())) continue;
      if (c.vocab() > 1) continue;  // enlarged, for a way of large weights
      const Outcome o = run(c);
      EXPECT_EQ(o.out.loss.get(), 0);
      for (int64_t v = 0; v < 4; ++v) EXPECT_EQ(o.out.db.get(v), 0);
      for (int64_t i = 0; i < 5; ++i) {
        EXPECT_EQ(o.out.dw.get(0, i), 0);
        for (int64_t t = 0; t < 9; ++t) EXPECT_EQ(o.out.dx.get(t, i), 0);
      }
    }
}

TEST_P(Edges, PaddingIsNeverRead) {
  for (const DType dtype : working_types)
    for (const int64_t padding : {1, 53}) {
      Case c = none_case({.vocab = 11 + padding, .dtype = dtype, .bias = true});
      c.options.vocab = 11;
      c.options.label_smoothing = 0.1;
      for (int64_t t = 0; t < 7; ++t) c.in.targets.set_integer(t, 0, t);
      for (int64_t v = 11; v < 11 + padding; ++v) {
        for (int64_t i = 0; i < 5; ++i) c.in.weight.set(v, i, NAN);
        c.in.bias.set(v, 0, v % 2 ? inf : 1e30);
      }
      want_everything(c, 3);
      expect_right(c);
    }
}

// Small integers: products are exact, so a tie is a tie in every lane.
TEST_P(Edges, TiesGoToTheLowestId) {
  for (const auto& [vocab, dtype] : {std::pair<int64_t, DType>{11, DType::f32},
                                     {700, DType::f32},
                                     {11, DType::bf16},
                                     {700, DType::bf16}})
    for (const int64_t first : {int64_t{0}, int64_t{3}, vocab / 2 - 1, vocab - 2}) {
      Case c = plain_case({.tokens = 4, .hidden = 2, .vocab = vocab, .dtype = dtype});
      for (int64_t t = 0; t < 4; ++t) c.in.hidden.set(t, 0, 1), c.in.hidden.set(t, 1, 0);
      for (int64_t v = 0; v < vocab; ++v)
        c.in.weight.set(v, 0, v == first || v == first + 1 ? 2 : 1);
      want_everything(c, 5);
      expect_right(c);
      if (!accepts(c)) continue;
      const Outcome o = run(c);
      std::vector<int64_t> want = {first, first + 1};
      for (int64_t v = 0; want.size() < 5; ++v)
        if (v != first && v != first + 1) want.push_back(v);
      for (int64_t t = 0; t < 4; ++t) {
        EXPECT_EQ(o.out.argmax.integer(t), first);
        for (int64_t j = 0; j < 5; ++j)
          EXPECT_EQ(o.out.topk_ids.integer(t, j), want[static_cast<size_t>(j)]) << j;
      }
    }
}

// Rows of several parts, as a device cuts them: the best of each part's first and last ids.
TEST_P(Edges, TopKOfEveryPart) {
  const int64_t vocab = 33013;
  for (const DType dtype : two_types)
    for (const int64_t best : {int64_t{0}, vocab / 2, vocab - 1}) {
      Case c = plain_case({.tokens = 3, .hidden = 4, .vocab = vocab, .dtype = dtype});
      for (int64_t t = 0; t < 3; ++t) c.in.hidden.set(t, 0, 4);
      c.in.weight.set(best, 0, 8);
      want_everything(c, 4);
      expect_right(c);
    }
}

TEST_P(Edges, TopKOfEveryWidth) {
  for (const DType dtype : two_types)
    for (const int64_t k : {1, 7, 31, 32}) {
      Case c = plain_case({.vocab = 257, .dtype = dtype});
      want_everything(c, k);
      expect_right(c);
      Case all = plain_case({.vocab = k, .dtype = dtype});
      want_everything(all, k);
      expect_right(all);
    }
}

}  // namespace
}  // namespace talea::testing
