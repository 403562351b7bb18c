// What: the contract on lane sm90, in the shapes and options that it accepts.
// Why: the common suites draw shapes that TMA refuses; here every case must be taken.
// Never: looser than the contract's accuracy rule.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "ops/linear_cross_entropy/forced.hpp"
#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {
namespace {

std::vector<std::string> hopper_lane() {
  const auto all = lanes_here();
  if (std::find(all.begin(), all.end(), "sm90") == all.end()) return {};
  return {"sm90"};
}

class Sm90 : public LaneTest {
 protected:
  // Outputs of the lane only; every case must be accepted and right.
  void must_be_right(Case c, const std::string& what) {
    ASSERT_TRUE(accepts(c)) << what << " is declined";
    expect_right(c, what);
  }
  // Weights of more than 2^17 elements take the folded path, smaller ones two terms.
  Case bf16_case(int64_t tokens, int64_t hidden, int64_t vocab, double spread = 1,
                 bool bias = false) {
    Case c = plain_case({.tokens = tokens,
                         .hidden = hidden,
                         .vocab = vocab,
                         .dtype = DType::bf16,
                         .spread = spread,
                         .bias = bias});
    c.options.reduction = Reduction::none;
    want_everything(c);
    c.out.argmax = c.out.accuracy = Array();  // the wide path has tests of its own
    return c;
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Sm90);
INSTANTIATE_TEST_SUITE_P(Lanes, Sm90, ::testing::ValuesIn(hopper_lane()),
                         [](const auto& info) { return info.param; });

TEST_P(Sm90, RaggedShapes) {
  for (const int64_t tokens : {1, 127, 128, 129, 257})
    for (const int64_t hidden : {8, 72, 264})
      for (const int64_t vocab : {1, 7, 191, 192, 193, 1000})
        must_be_right(bf16_case(tokens, hidden, vocab), "shape " + std::to_string(tokens) + " " +
                                                            std::to_string(hidden) + " " +
                                                            std::to_string(vocab));
}

TEST_P(Sm90, EveryOptionOfTheLane) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean})
    for (const double smoothing : {0.0, 0.1})
      for (const double softcap : {0.0, 4.0}) {
        for (const double scale : {1.0, -0.7}) {
          Case c = bf16_case(150, 264, 500, 2, true);
          c.options.reduction = reduction;
          c.options.label_smoothing = smoothing;
          c.options.softcap = softcap;
          c.options.logit_scale = scale;
          c.options.z_loss = 1e-3;
          if (reduction != Reduction::none) want_everything(c);
          for (int64_t t = 0; t < 150; t += 3) c.in.targets.set_integer(t, 0, -100);
          must_be_right(c, "reduction " + std::to_string(static_cast<int>(reduction)) +
                               " smoothing " + std::to_string(smoothing) + " softcap " +
                               std::to_string(softcap) + " scale " + std::to_string(scale));
        }
      }
}

// Weights of more than 2^17 elements: one 16-bit term of da, in each of the three paths.
TEST_P(Sm90, OptionsThatNeedAPassOverTheBuffer) {
  struct Setting {
    const char* name;
    void (*bend)(Spec&);
  };
  const Setting settings[] = {
      {"plain", [](Spec&) {}},
      {"gradient of the entropy", [](Spec& s) { s.upstream_entropy = true; }},
      {"gradient of the entropy, smoothed",
       [](Spec& s) {
         s.upstream_entropy = s.class_weight = true;
         s.label_smoothing = 0.1;
       }},
      {"softcap and smoothing",
       [](Spec& s) {
         s.softcap = 5;
         s.label_smoothing = 0.1;
         s.class_weight = true;
       }},
      {"top-k", [](Spec& s) { s.top_k = 5; }},
      {"top-k under a softcap",
       [](Spec& s) {
         s.softcap = 5;
         s.top_k = 32;
       }},
      {"dense soft targets", [](Spec& s) { s.soft = Soft::dense; }},
      {"sparse soft targets", [](Spec& s) { s.soft = Soft::sparse_with_ignored; }},
      {"a large softcap and smoothing",
       [](Spec& s) {
         s.softcap = 60;
         s.label_smoothing = 0.5;
       }},
      {"everything", [](Spec& s) {
         s.bias = s.class_weight = s.token_weight = s.token_scale = s.upstream_lse = true;
         s.upstream_entropy = true;
         s.upstream = Upstream::reversed;
         s.label_smoothing = 0.1;
         s.z_loss = 0.01;
         s.softcap = 30;
         s.top_k = 5;
         s.padding = 3;
         s.ignored_percent = 30;
       }}};
  for (const Types types : {Types::bf16, Types::f16})
    for (const Setting& setting : settings)
      for (const bool rows : {true, false}) {
        Spec s{.seed = 23, .tokens = 70, .hidden = 264, .vocab = 601, .types = types};
        s.reduction = Reduction::none;
        s.wants_rows = rows;
        setting.bend(s);
        must_be_right(make_case(s), std::string(setting.name) + (rows ? "" : ", loss only") +
                                        (types == Types::f16 ? ", fp16" : ""));
      }
}

// Up to 128 rows and no gradient: sums relative to each tile's own maximum.
TEST_P(Sm90, FewRowsLossOnly) {
  for (const int64_t tokens : {1, 3, 64, 128})
    for (const double spread : {1.0, 200.0})
      for (const bool bias : {false, true}) {
        Case c = bf16_case(tokens, 264, 1000, spread, bias);
        c.out.dx = c.out.dw = c.out.db = Array();
        must_be_right(c, "few rows");
        if (!bias) continue;
        for (int64_t v = 0; v < 999; ++v) c.in.bias.set(v, 0, -INFINITY);
        must_be_right(c, "one word possible");
        c.in.bias.set(5, 0, INFINITY);
        must_be_right(c, "an infinite logit");
      }
  // Tiles of 256 words: 67 of 192 would leave one for the last wave.
  for (const int64_t tokens : {3, 128})
    for (const bool bias : {false, true}) {
      Case c = bf16_case(tokens, 72, 13001, 20, bias);
      c.out.dx = c.out.dw = c.out.db = Array();
      must_be_right(c, "wider tiles");
    }
}

// Their rows are found and gathered in one launch, ended and summed in another.
TEST_P(Sm90, FewRowsAndTheirScalar) {
  for (const int64_t tokens : {1, 2, 65, 128, 129, 256})
    for (const Reduction reduction : {Reduction::sum, Reduction::mean})
      for (const int64_t every : {1, 3, 1000}) {  // of the rows from the second on, ignored
        Case c = bf16_case(tokens, 264, 1000);
        c.options.reduction = reduction;
        c.options.label_smoothing = tokens % 2 == 0 ? 0.1 : 0;
        c.out = {};
        c.out.loss = Array(DType::f32, {});
        if (tokens == 65) c.out.lse = Array(DType::f32, {tokens});
        for (int64_t t = every == 1 ? 0 : 1; t < tokens; t += every)
          c.in.targets.set_integer(t, 0, -100);
        must_be_right(c, "tokens " + std::to_string(tokens) + " every " + std::to_string(every));
        c.options.target_check = TargetCheck::poison;
        c.in.targets.set_integer(tokens / 2, 0, 1000);
        must_be_right(c, "foreign, tokens " + std::to_string(tokens));
      }
}

// More tiles of the vocabulary than a block takes at once.
TEST_P(Sm90, FewRowsOfAWideVocabulary) {
  Case c = bf16_case(3, 8, 200001, 30);
  c.out.dx = c.out.dw = c.out.db = Array();
  must_be_right(c, "wide");
  c = bf16_case(3, 8, 400001, 1);
  c.out.dx = c.out.dw = c.out.db = Array();
  must_be_right(c, "wider");
}

// The list of the best: of as few words as are asked for, of one tile and of several, of rows that
// are flat and of rows with a clear winner.
TEST_P(Sm90, BestWordsOfEveryWidth) {
  for (const int64_t vocab : {5, 193, 2500, 20000})
    for (const int64_t kept : {1, 5, 32})
      for (const double spread : {1.0, 40.0}) {
        if (kept > vocab) continue;
        const int64_t hidden = std::max<int64_t>(264, (1 << 17) / vocab / 8 * 8 + 8);
        Case c = bf16_case(9, hidden, vocab, spread);
        want_everything(c, kept);
        c.out.dx = c.out.dw = c.out.db = Array();
        must_be_right(c, "vocab " + std::to_string(vocab) + " kept " + std::to_string(kept) +
                             " spread " + std::to_string(spread));
      }
}

TEST_P(Sm90, ConfidentAndFarRows) {
  for (const double spread : {6.0, 30.0, 200.0})
    must_be_right(bf16_case(300, 264, 777, spread), "spread");
  // The first tile of the vocabulary lies far below the rest: the shift taken from it is repaired.
  Case c = bf16_case(300, 264, 777, 1, true);
  for (int64_t v = 0; v < 192; ++v) c.in.bias.set(v, 0, -150);
  must_be_right(c, "repaired shift");
  for (int64_t v = 0; v < 192; ++v) c.in.bias.set(v, 0, -INFINITY);
  for (int64_t t = 0; t < 300; ++t) c.in.targets.set_integer(t, 0, 192 + t);
  must_be_right(c, "first tile impossible");
}

// Rows with p > 0.999, against the truth: what is left of dX is 1 - p times small differences.
TEST_P(Sm90, ConfidentRowsKeepTheirGradient) {
  Case c = bf16_case(200, 256, 2048);
  for (int64_t t = 0; t < 200; ++t) {
    const int64_t y = c.in.targets.integer(t);
    Real norm = 0;
    for (int64_t i = 0; i < 256; ++i) norm += c.in.weight.get(y, i) * c.in.weight.get(y, i);
    const Real reach = 15 + static_cast<Real>(t) / 20;  // 1 - p from 1e-3 to 1e-7
    for (int64_t i = 0; i < 256; ++i) c.in.hidden.set(t, i, reach * c.in.weight.get(y, i) / norm);
  }
  must_be_right(c, "confident rows");
  const Outcome o = run(c);
  const Answer truth = oracle(c);
  std::vector<Real> errors;
  for (int64_t t = 0; t < 200; ++t) {
    if (!(truth.target_logprob[size_t(t)] > std::log(0.999L))) continue;
    Real error = 0, size = 0;
    for (int64_t i = 0; i < 256; ++i) {
      const Real want = truth.dx[size_t(t * 256 + i)], off = o.out.dx.get(t, i) - want;
      error += off * off, size += want * want;
    }
    errors.push_back(std::sqrt(error / size));
  }
  ASSERT_GT(errors.size(), 100u);
  std::sort(errors.begin(), errors.end());
  std::printf("%zu rows with p > 0.999: relative error of dX median %.2e, worst %.2e\n",
              errors.size(), double(errors[errors.size() / 2]), double(errors.back()));
  EXPECT_TRUE(errors[errors.size() / 2] <= 0.01L);
  EXPECT_TRUE(errors.back() <= 0.05L);
}

TEST_P(Sm90, DwIsAsGoodInSixtyFourChunksAsInOne) {
  Case c = plain_case({.tokens = 16384, .hidden = 64, .vocab = 2100, .dtype = DType::bf16});
  c.options.reduction = Reduction::mean;
  c.out = {};
  c.out.loss = Array(DType::f32, {});
  c.out.dw = Array(DType::f32, {2100, 64});
  c.options.workspace_limit_bytes = int64_t{1} << 30;
  const Outcome one = run(c);
  c.options.workspace_limit_bytes = 0;
  const Outcome many = run(c);
  EXPECT_EQ(many.result.chunks, 64);
  EXPECT_LT(one.result.chunks, 8);
  Real error = 0, size = 0;
  for (int64_t v = 0; v < 2100; ++v)
    for (int64_t i = 0; i < 64; ++i) {
      const Real a = one.out.dw.get(v, i), b = many.out.dw.get(v, i);
      error += (a - b) * (a - b), size += a * a;
    }
  std::printf("dW in %lld and in %lld chunks: relative difference %.2e\n",
              static_cast<long long>(one.result.chunks), static_cast<long long>(many.result.chunks),
              double(std::sqrt(error / size)));
  // The contract's bound where sums run in another order; one 16-bit rounding would be 1e-3.
  EXPECT_TRUE(std::sqrt(error / size) <= 1e-5L);
}

TEST_P(Sm90, PaddedVocabularyAndForeignTargets) {
  Case c = bf16_case(140, 264, 512);
  c.options.vocab = 501;
  for (int64_t t = 0; t < 140; ++t) c.in.targets.set_integer(t, 0, t);
  c.options.target_check = TargetCheck::poison;
  c.in.targets.set_integer(2, 0, 505);
  c.in.targets.set_integer(3, 0, -1);
  c.in.targets.set_integer(4, 0, -100);
  must_be_right(c, "padding");
}

TEST_P(Sm90, SpecialRowsStayAlone) {
  Case c = bf16_case(140, 264, 512);
  for (const int64_t t : {0, 70, 139}) c.in.targets.set_integer(t, 0, -100);
  const Outcome clean = run(c);
  for (const int64_t t : {0, 70, 139}) c.in.hidden.set(t, 5, NAN);
  EXPECT_EQ(same_bits(clean.out, run(c).out), "") << "an ignored row leaks";
  c.in.hidden.set(8, 3, NAN);
  expect_right(c, "NaN row");
  const Outcome spoiled = run(c);
  for (int64_t t = 0; t < 140; ++t) {
    if (t == 8) continue;
    EXPECT_EQ(spoiled.out.loss.get(t), clean.out.loss.get(t));
    for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(spoiled.out.dx.get(t, i), clean.out.dx.get(t, i));
  }
}

TEST_P(Sm90, LossAndDxDoNotDependOnTheChunk) {
  Case c = bf16_case(1100, 72, 2000, 3);
  c.options.workspace_limit_bytes = 1 << 20;
  const Outcome small = run(c);
  c.options.workspace_limit_bytes = int64_t{1} << 30;
  const Outcome large = run(c);
  EXPECT_GT(small.result.chunks, large.result.chunks);
  for (int64_t t = 0; t < 1100; ++t) {
    EXPECT_EQ(small.out.loss.get(t), large.out.loss.get(t));
    for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(small.out.dx.get(t, i), large.out.dx.get(t, i));
  }
}

// Of a frozen weight: a short last chunk has tiles of dX of another shape, and no other bits. A
// chunk's rows lie in rows of dX that are not yet written, wherever the ignored ones are.
TEST_P(Sm90, AShortLastChunkOfDxAlone) {
  Case c = plain_case({.tokens = 1280, .hidden = 4096, .vocab = 1000, .dtype = DType::bf16});
  c.out = {};
  c.out.loss = Array(DType::f32, {});
  c.out.dx = Array(DType::bf16, {1280, 4096});
  c.options.reduction = Reduction::mean;
  for (const int64_t ignored : {0, 100, 700}) {
    for (int64_t t = 0; t < ignored; ++t) c.in.targets.set_integer(t * 7 % 1280, 0, -100);
    c.options.workspace_limit_bytes = 0;
    const Outcome shortest = run(c);
    EXPECT_EQ(shortest.result.chunk_rows, 256);
    c.options.workspace_limit_bytes = int64_t{1800} << 10;
    const Outcome two = run(c);
    EXPECT_EQ(two.result.chunk_rows, 768);  // 384 x 128, and 256 x 128 for the last 512
    EXPECT_EQ(same_bits(shortest.out, two.out), "") << ignored;
  }
  must_be_right(c, "rows in dX");
}

// Logits that run beside dW overwrite what it reads. At the size of the benchmarks the schedule
// alone keeps the order; with two blocks for dW only the waits do.
TEST_P(Sm90, LogitsWaitForASlowDw) {
  const lce::Forced before = lce::forced;
  lce::forced.slow = true, lce::forced.two_terms = false;
  const auto says = [](const Outcome& o, const char* schedule) {
    return std::any_of(o.result.notes.begin(), o.result.notes.end(), [&](const std::string& note) {
      return note.find(schedule) != std::string::npos;
    });
  };
  Case c = plain_case({.tokens = 1100, .hidden = 72, .vocab = 6001, .dtype = DType::bf16});
  c.out = {};
  c.out.loss = Array(DType::f32, {});
  c.out.dx = Array(DType::bf16, {1100, 72}), c.out.dw = Array(DType::f32, {6001, 72});
  c.options.reduction = Reduction::mean;
  for (int64_t t = 3; t < 1100; t += 7) c.in.targets.set_integer(t, 0, -100);
  c.options.workspace_limit_bytes = int64_t{13} << 19;  // chunks of up to 512 rows
  EXPECT_TRUE(says(run(c), "beside dW"));
  must_be_right(c, "chunks");
  c.out.dw = Array(DType::bf16, {6001, 72});
  c.options.workspace_limit_bytes = int64_t{10} << 19;  // slices of 1536 words
  lce::forced.slices = true;
  EXPECT_TRUE(says(run(c), "slices"));
  must_be_right(c, "slices");
  lce::forced = before;
}

TEST_P(Sm90, EveryRowIgnored) {
  Case c = bf16_case(140, 264, 512);
  for (int64_t t = 0; t < 140; ++t) c.in.targets.set_integer(t, 0, -100);
  must_be_right(c, "none");
  c.options.reduction = Reduction::mean;
  want_everything(c);
  must_be_right(c, "mean");
}

}  // namespace
}  // namespace talea::testing
