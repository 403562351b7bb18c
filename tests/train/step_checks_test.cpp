// What: the verdict on steps that were made up: spikes, wide bands, numbers that are not finite.
// Why: a verdict that one bad step loosens for ever, or that holds without a yardstick, is none.
// Never: trains a model.
#include "train/step_checks.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace talea::train {
namespace {

constexpr int64_t steps = 60, spike = 5;

// A step in which everything is as quiet as fp32 allows.
StepRecord quiet(int64_t step) {
  StepRecord r;
  r.candidate.step = step;
  r.candidate.loss = r.reference.loss = 3;
  r.candidate.grad_norm = r.reference.grad_norm = 1;
  r.candidate.clip = 1;
  for (const auto& [name, field] : same_fields) r.same.*field = r.plain.*field = 1e-9;
  for (const auto& [name, field] : drift_fields) r.drift.*field = r.band.*field = 1e-6;
  r.apart = r.apart_band = 1e-6;
  r.beside = {{.lane = "reference"}, {.lane = "unfused", .drift_loss = 1e-6, .drift_params = 1e-6}};
  return r;
}

StepChecks checks_of_two_twins() {
  TwinOptions options;
  options.twins = 2;
  options.beside = {"unfused"};
  return {Tolerances{}, options};
}

template <typename Change>
StepChecks after(const Change& change) {
  StepChecks checks = checks_of_two_twins();
  for (int64_t s = 1; s <= steps; ++s) {
    StepRecord r = quiet(s);
    change(r, s);
    checks.see(r);
  }
  return checks;
}

std::string first_of(const StepChecks& checks) {
  std::string name;
  checks.first_past(&name);
  return name;
}

TEST(StepChecks, QuietStepsPass) {
  const StepChecks checks = after([](StepRecord&, int64_t) {});
  EXPECT_TRUE(checks.passed());
  EXPECT_EQ(checks.first_void(), -1);
}

// With a running maximum the spike of the plain step would allow the same to every later one.
TEST(StepChecks, OneIllConditionedStepLoosensNoLaterOne) {
  const StepChecks with_it = after([](StepRecord& r, int64_t s) {
    if (s == spike) r.plain.grads = r.same.grads = 1e-2;
  });
  EXPECT_TRUE(with_it.passed()) << first_of(with_it);
  const StepChecks later = after([](StepRecord& r, int64_t s) {
    if (s == spike) r.plain.grads = 1e-2;
    if (s == steps) r.same.grads = 1e-2;
  });
  EXPECT_FALSE(later.passed());
  EXPECT_EQ(first_of(later), "same state: gradients");
}

TEST(StepChecks, OneWideBandLoosensNoLaterOne) {
  const StepChecks checks = after([](StepRecord& r, int64_t s) {
    if (s == spike) r.band.params = 9e-4;
    if (s > steps - Trailing::span) r.drift.params = 1e-4;
  });
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(first_of(checks), "drift over band: parameters");
  const StepChecks base = after([](StepRecord& r, int64_t s) {
    if (s == spike) r.apart_band = 9e-4;
    if (s > steps - Trailing::span) r.apart = 1e-4;
  });
  EXPECT_EQ(first_of(base), "drift over band: parameters from base");
  const StepChecks beside = after([](StepRecord& r, int64_t s) {
    if (s == spike) r.band.loss = 1;
    if (s > steps - Trailing::span) r.beside[1].drift_loss = 1e-4;
  });
  EXPECT_EQ(first_of(beside), "lane unfused over band: loss");
}

TEST(StepChecks, ARunWithoutAYardstickIsVoidAndDoesNotPass) {
  const StepChecks checks = after([](StepRecord& r, int64_t s) {
    if (s >= 40) r.band.params = 2e-3;
  });
  EXPECT_EQ(checks.first_void(), 40);
  EXPECT_FALSE(checks.passed());
  EXPECT_EQ(first_of(checks), "band of the twins: parameters");
  int64_t voided = 0;
  for (const Check& c : checks.checks()) {
    if (!c.is_void) continue;
    ++voided;
    EXPECT_EQ(c.seen, 39) << c.name;
  }
  EXPECT_EQ(voided, 11);  // eight drifts, from base, two of the lane beside
  const StepChecks nan = after([](StepRecord& r, int64_t s) {
    if (s == 7) r.band.params = std::numeric_limits<double>::quiet_NaN();
  });
  EXPECT_EQ(nan.first_void(), 7);
  EXPECT_FALSE(nan.passed());
}

TEST(StepChecks, ADriftOfManyBandsFailsAndSoDoesNaN) {
  EXPECT_FALSE(after([](StepRecord& r, int64_t) { r.drift.m = 1e-5; }).passed());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(after([&](StepRecord& r, int64_t s) { r.drift.m = s == 9 ? nan : 1e-6; }).passed());
  EXPECT_FALSE(after([&](StepRecord& r, int64_t s) {
                 r.plain.m = s == 9 ? nan : 1e-9;
                 r.same.m = s == 9 ? 1e-4 : 1e-9;
               }).passed());
}

TEST(StepChecks, TheBaseLeads) {
  const std::vector<Check> list = checks_of_two_twins().checks();
  size_t from_base = list.size(), from_fp64 = list.size();
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].name == "drift over band: parameters from base") from_base = i;
    if (list[i].name == "drift over band: parameters") from_fp64 = i;
  }
  EXPECT_LT(from_base, from_fp64);
}

}  // namespace
}  // namespace talea::train
