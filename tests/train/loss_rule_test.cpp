// What: accumulation rules, empty micro-steps and schedules against hand-made numbers.
// Why: a wrong divisor trains quietly.
// Never: trains.
#include <gtest/gtest.h>

#include <cmath>

#include "train/compare.hpp"
#include "train/optimizer.hpp"
#include "train/presets.hpp"
#include "train/stream.hpp"
#include "train/trainer.hpp"

namespace talea::train {
namespace {

Batch batch_of(const std::vector<int64_t>& targets) {
  Batch b;
  b.sequences = 1;
  b.seq_len = static_cast<int64_t>(targets.size());
  b.targets = targets;
  for (size_t i = 0; i < targets.size(); ++i) b.inputs.push_back(static_cast<int32_t>(i % 5));
  return b;
}

TrainConfig small() {
  TrainConfig c;
  c.model.form = "tiny";
  c.model.vocab = 8;
  c.model.hidden = 4;
  c.model.ffn = 4;
  return c;
}

TEST(TrainLossRule, TotalTokensEqualsOneBigBatch) {
  TrainConfig c = small();
  c.accumulation = Accumulation::total_tokens;
  Trainer<double> parts(c, "reference", "", 1), whole(c, "reference", "", 1);
  const Batch a = batch_of({1, 2, ignore_index, 3}),
              b = batch_of({ignore_index, 5, ignore_index, ignore_index});
  parts.micro(a, {2, 4});
  parts.micro(b, {2, 4});
  Batch both = a;
  both.sequences = 2;
  both.inputs.insert(both.inputs.end(), b.inputs.begin(), b.inputs.end());
  both.targets.insert(both.targets.end(), b.targets.begin(), b.targets.end());
  whole.micro(both, {1, 4});
  EXPECT_LT(relative_l2(parts.state().grads, whole.state().grads), 1e-14);
  EXPECT_NEAR(parts.state().window_loss, whole.state().window_loss, 1e-14);
  // Mean of means weighs the lone token of b as much as the three of a.
  c.accumulation = Accumulation::mean_of_means;
  Trainer<double> means(c, "reference", "", 1);
  means.micro(a, {2, 4});
  means.micro(b, {2, 4});
  EXPECT_GT(relative_l2(means.state().grads, whole.state().grads), 0.01);
}

TEST(TrainLossRule, AnEmptyMicroStepAddsExactlyNothing) {
  for (Accumulation rule : {Accumulation::mean_of_means, Accumulation::total_tokens}) {
    TrainConfig c = small();
    c.accumulation = rule;
    Trainer<float> t(c, "reference", "", 1);
    t.micro(batch_of({1, 2, 3, 4}), {2, 4});
    const auto before = t.state().grads;
    t.micro(batch_of({ignore_index, ignore_index, ignore_index, ignore_index}), {2, 4});
    EXPECT_EQ(t.state().grads, before);
    EXPECT_TRUE(std::isfinite(t.update().loss));
  }
}

TEST(TrainLossRule, AnEmptyMeanIsNanWithZeroGradientsAsInTorch) {
  const TrainConfig c = small();
  const auto model = make_model<float>(c.model, 1);
  const auto loss = make_loss<float>("auto", c, 1);
  const std::vector<float> params = initial_parameters<float>(model->layout(), 1);
  std::vector<float> grads(params.size(), 0.0f);
  const LossShare share{1, 0, false};
  const auto r = model->step(grads.data(), params.data(), batch_of({ignore_index, ignore_index}),
                             share, *loss, nullptr);
  EXPECT_TRUE(std::isnan(r.loss));
  for (float g : grads) EXPECT_EQ(g, 0.0f);
}

TEST(TrainLossRule, AnEmptyWindowStillStepsTheOptimizer) {
  TrainConfig c = small();
  c.accumulation = Accumulation::total_tokens;
  Trainer<float> t(c, "reference", "", 1);
  const float before = t.state().params[0];
  t.micro(batch_of({ignore_index, ignore_index}), {1, 0});
  const StepReport r = t.update();
  EXPECT_EQ(r.grad_norm, 0.0);
  EXPECT_EQ(r.loss, 0.0);
  EXPECT_EQ(t.state().params[0], static_cast<float>(before * (1.0 - 1e-3 * 0.01)));
}

TEST(TrainLossRule, SchedulesAndClipping) {
  OptimizerConfig c;
  c.lr = 1;
  c.warmup_steps = 10;
  EXPECT_DOUBLE_EQ(learning_rate(c, 5, 110), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(c, 60, 110), 1.0);
  c.schedule = Schedule::linear;
  EXPECT_DOUBLE_EQ(learning_rate(c, 60, 110), 0.5);
  c.schedule = Schedule::cosine;
  c.min_lr = 0.1;
  EXPECT_DOUBLE_EQ(learning_rate(c, 60, 110), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(c, 110, 110), 0.1);
  EXPECT_DOUBLE_EQ(clip_scale(0.5, 1), 1.0);
  EXPECT_DOUBLE_EQ(clip_scale(2 - 1e-6, 1), 0.5);
  EXPECT_DOUBLE_EQ(clip_scale(100, 0), 1.0);
  EXPECT_TRUE(std::isnan(clip_scale(NAN, 1)));
}

TEST(TrainLossRule, SgdWithMomentumByHand) {
  OptimizerConfig c;
  c.kind = OptimizerKind::sgd;
  c.momentum = 0.5;
  c.weight_decay = 0;
  double p = 1, m = 0, v = 0, g = 2;
  optimizer_step<double>(c, "", 0.1, 1, 1, &p, &m, &v, &g);
  EXPECT_DOUBLE_EQ(p, 0.8);
  optimizer_step<double>(c, "", 0.1, 2, 1, &p, &m, &v, &g);
  EXPECT_DOUBLE_EQ(p, 0.5);  // 0.8 - 0.1 (0.5 * 2 + 2)
}

// B25: the comparisons themselves.
TEST(TrainLossRule, ComparisonsFailOnNan) {
  Worst w(1.0);
  EXPECT_FALSE(w.passed());  // nothing seen
  w.see(0.5, 1);
  EXPECT_TRUE(w.passed());
  w.see(NAN, 2);
  w.see(0.1, 3);
  EXPECT_FALSE(w.passed());
  EXPECT_EQ(w.first_past(), 2);
  EXPECT_TRUE(std::isnan(w.worst()));
  const std::vector<float> a = {1, NAN, 3}, b = {1, 2, 3};
  EXPECT_TRUE(std::isnan(relative_l2(a, b)));
  EXPECT_TRUE(std::isnan(relative_l2(b, a)));
  EXPECT_TRUE(std::isnan(relative_max(a, b, 1)));
  EXPECT_TRUE(std::isnan(relative_max(b, a, 1)));
  EXPECT_TRUE(std::isnan(relative(NAN, 1)));
}

TEST(TrainLossRule, StreamsHoldWhatTheyPromise) {
  Corpus corpus;
  for (int i = 0; i < 4000; ++i) corpus.bytes.push_back(static_cast<uint8_t>('a' + i % 23));
  for (const std::string& name : stream_names()) {
    TrainConfig c = preset("smoke");
    c.data.stream = name;
    c.data.total_tokens = 3200;
    Stream stream(c, corpus), again(c, corpus);
    int64_t ignored = 0, tokens = 0, empty = 0;
    for (int64_t i = 0; i < 400; ++i) {
      const Batch b = stream.micro(i);
      if (i % 37 == 0) {
        EXPECT_EQ(again.micro(i).inputs, b.inputs) << name;
      }
      ignored += b.tokens() - b.valid();
      tokens += b.tokens();
      empty += b.valid() == 0;
      EXPECT_EQ(b.soft_k > 0, name == "soft");
    }
    const double share = double(ignored) / double(tokens);
    if (name == "ignored") {
      EXPECT_NEAR(share, 0.2, 0.03);
    } else if (name == "varlen") {
      EXPECT_NEAR(share, 0.4375, 0.05);
    } else if (name == "empty-micro") {
      EXPECT_EQ(empty, 50);
    } else {
      EXPECT_EQ(ignored, 0) << name;
    }
  }
}

}  // namespace
}  // namespace talea::train
