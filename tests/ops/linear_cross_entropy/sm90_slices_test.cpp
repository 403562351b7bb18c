// What: lane sm90's gradients by slices of the vocabulary, after a pass for the row states and from
// saved ones.
// Why: the schedule follows the room and the inputs, and must be as right as the chunks.
// Never: passes where another schedule ran: every case says which one it saw.
#include <algorithm>
#include <cmath>

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

class Sm90Slices : public LaneTest {
 protected:
  // The least limit, in steps of an eighth, under which the call says that it ran like this.
  Outcome run_under(Case& c, const std::string& schedule) {
    for (int64_t limit = 1 << 20; limit < (int64_t{1} << 28); limit += limit / 8) {
      c.options.workspace_limit_bytes = limit;
      Outcome o = run(c);
      for (const std::string& note : o.result.notes)
        if (note.find(schedule) != std::string::npos) return o;
    }
    ADD_FAILURE() << "no limit made the lane run " << schedule;
    return run(c);
  }

  // What an earlier call leaves; lse and log-probability in fp32.
  void save(Case& c) {
    Case first = c;
    first.in.upstream = first.in.upstream_lse = first.in.upstream_entropy = Array();
    first.out = {};
    first.out.lse = first.out.target_logprob = Array(DType::f32, {c.tokens()});
    const Outcome o = run(first);
    c.in.saved_lse = o.out.lse;
    c.in.saved_target_logprob = o.out.target_logprob;
    CaseOutputs gradients;
    gradients.dx = c.out.dx, gradients.dw = c.out.dw, gradients.db = c.out.db;
    c.out = gradients;
  }

  // Right in every option that the schedule takes; `saved`: from an earlier call.
  void options_are_right(bool saved, bool wide_gradients);
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Sm90Slices);
INSTANTIATE_TEST_SUITE_P(Lanes, Sm90Slices, ::testing::ValuesIn(hopper_lane()),
                         [](const auto& info) { return info.param; });

struct Setting {
  const char* name;
  void (*bend)(Spec&);
  bool saved = true;  // possible with saved states
};
const Setting settings[] = {
    {"plain", [](Spec&) {}},
    {"ignored rows", [](Spec& s) { s.ignored_percent = 60; }},
    {"bias", [](Spec& s) { s.bias = true; }},
    {"smoothing", [](Spec& s) { s.label_smoothing = 0.1, s.class_weight = true; }},
    {"softcap", [](Spec& s) { s.softcap = 5; }},
    {"softcap and smoothing",
     [](Spec& s) { s.softcap = 5, s.label_smoothing = 0.1, s.class_weight = s.bias = true; }},
    {"token scale", [](Spec& s) { s.token_scale = true; }},
    {"negative scale", [](Spec& s) { s.logit_scale = -0.7; }},
    {"weights and z-loss", [](Spec& s) { s.token_weight = true, s.z_loss = 0.01; }},
    {"gradient of lse", [](Spec& s) { s.upstream_lse = true; }},
    {"gradient of the entropy", [](Spec& s) { s.upstream_entropy = s.bias = true; }, false},
    {"everything",
     [](Spec& s) {
       s.bias = s.class_weight = s.token_weight = s.token_scale = s.upstream_lse = true;
       s.label_smoothing = 0.1, s.z_loss = 0.01, s.softcap = 30;
       s.padding = 3, s.ignored_percent = 30, s.poison = true;
     }},
};

void Sm90Slices::options_are_right(bool saved, bool wide_gradients) {
  for (const Setting& setting : settings)
    for (const int vocab : {3840, 4001}) {
      if (saved && !setting.saved) continue;
      Spec s{.seed = 31, .tokens = 280, .hidden = 72, .vocab = vocab, .types = Types::bf16};
      s.reduction = Reduction::none;
      s.upstream = Upstream::reversed;
      s.wide_gradients = wide_gradients;
      s.accumulate = wide_gradients;
      setting.bend(s);
      Case c = make_case(s);
      c.out.argmax = c.out.accuracy = Array();  // the best words need whole rows
      if (saved) save(c);
      const std::string what = setting.name + std::string(", vocabulary ") + std::to_string(vocab);
      const Outcome o =
          run_under(c, saved ? "row states from saved outputs" : "after a pass for the row states");
      expect_right(c, what);
      EXPECT_EQ(same_bits(o.out, run(c).out), "") << what << ": another run";
    }
}

TEST_P(Sm90Slices, AfterAPassForTheRowStates) { options_are_right(false, false); }
TEST_P(Sm90Slices, FromSavedStates) { options_are_right(true, true); }
TEST_P(Sm90Slices, FromSavedStatesRoundedOnce) { options_are_right(true, false); }

TEST_P(Sm90Slices, EachGradientAlone) {
  for (const bool dx : {true, false}) {
    Spec s{.seed = 37, .tokens = 520, .hidden = 136, .vocab = 3001, .types = Types::bf16};
    s.wants_dx = dx, s.wants_dw = !dx, s.wants_db = false;
    s.reduction = Reduction::none;
    s.upstream = Upstream::contiguous;
    Case c = make_case(s);
    save(c);
    run_under(c, "slices of the vocabulary");
    expect_right(c, dx ? "dX alone" : "dW alone");
  }
}

TEST_P(Sm90Slices, EveryRowIgnored) {
  Spec s{.seed = 38, .tokens = 280, .hidden = 72, .vocab = 4001, .types = Types::bf16};
  Case c = make_case(s);
  c.out.argmax = c.out.accuracy = Array();
  run_under(c, "slices of the vocabulary");
  for (int64_t t = 0; t < 280; ++t) c.in.targets.set_integer(t, 0, c.options.ignore_index);
  expect_right(c, "all ignored");
}

TEST_P(Sm90Slices, IgnoredRowsDoNotLeak) {
  Spec s{.seed = 39, .tokens = 280, .hidden = 72, .vocab = 4001, .types = Types::bf16};
  Case c = make_case(s);
  c.out.argmax = c.out.accuracy = Array();
  for (const int64_t t : {0, 100, 279}) c.in.targets.set_integer(t, 0, c.options.ignore_index);
  const Outcome clean = run_under(c, "slices of the vocabulary");
  for (const int64_t t : {0, 100, 279}) c.in.hidden.set(t, 5, NAN);
  EXPECT_EQ(same_bits(clean.out, run(c).out), "");
}

// Rows with p > 0.999, against the truth: what is left of dX is 1 - p times small differences.
TEST_P(Sm90Slices, ConfidentRowsKeepTheirGradient) {
  Case c = plain_case({.tokens = 200, .hidden = 256, .vocab = 2048, .dtype = DType::bf16});
  c.options.reduction = Reduction::none;
  for (int64_t t = 0; t < 200; ++t) {
    const int64_t y = c.in.targets.integer(t);
    Real norm = 0;
    for (int64_t i = 0; i < 256; ++i) norm += c.in.weight.get(y, i) * c.in.weight.get(y, i);
    const Real reach = 15 + static_cast<Real>(t) / 20;  // 1 - p from 1e-3 to 1e-7
    for (int64_t i = 0; i < 256; ++i) c.in.hidden.set(t, i, reach * c.in.weight.get(y, i) / norm);
  }
  save(c);
  const Outcome o = run_under(c, "slices of the vocabulary");
  expect_right(c, "confident rows");
  const Answer truth = oracle(c);
  std::vector<Real> errors;
  for (int64_t t = 0; t < 200; ++t) {
    Real error = 0, size = 0;
    for (int64_t i = 0; i < 256; ++i) {
      const Real want = truth.dx[size_t(t * 256 + i)], off = o.out.dx.get(t, i) - want;
      error += off * off, size += want * want;
    }
    errors.push_back(std::sqrt(error / size));
  }
  std::sort(errors.begin(), errors.end());
  EXPECT_TRUE(errors[errors.size() / 2] <= 0.01L) << double(errors[errors.size() / 2]);
  EXPECT_TRUE(errors.back() <= 0.05L) << double(errors.back());
}

TEST_P(Sm90Slices, AThousandRunsGiveTheSameBits) {
  Spec s{.seed = 40, .tokens = 280, .hidden = 72, .vocab = 4001, .types = Types::bf16};
  Case c = make_case(s);
  c.out.argmax = c.out.accuracy = Array();
  const Outcome first = run_under(c, "slices of the vocabulary");
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(same_bits(first.out, run(c).out), "") << "run " << i;
}

// Chunks whose states are formed in parts, and a loss alone by tiles' own maxima.
TEST_P(Sm90Slices, PartsOfAChunkChangeNothing) {
  Spec s{.seed = 41, .tokens = 1100, .hidden = 72, .vocab = 2001, .types = Types::bf16};
  s.softcap = 20, s.label_smoothing = 0.1, s.top_k = 5, s.ignored_percent = 20;
  s.wide_gradients = true;
  Case c = make_case(s);
  c.options.workspace_limit_bytes = int64_t{1} << 30;
  const Outcome whole = run(c);
  expect_right(c, "whole");
  int parts = 0;
  for (int64_t limit = 6 << 20; limit < 9 << 20; limit += 128 << 10) {
    c.options.workspace_limit_bytes = limit;
    const Outcome o = run(c);
    if (o.result.chunks != 1) continue;
    ++parts;
    EXPECT_EQ(same_bits(whole.out, o.out), "") << "limit " << limit;
  }
  EXPECT_GT(parts, 0);
}

}  // namespace
}  // namespace talea::testing
