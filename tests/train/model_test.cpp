// What: the training stack's gradients against central differences in fp64, every tensor.
// Why: a hand-written backward is right when random directions agree, not when it looks right.
// Never: compares against a value taken from the code under test.
#include "train/model.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "train/random.hpp"

namespace talea::train {
namespace {

Batch some_batch(const ModelConfig& c, bool soft) {
  Batch b;
  b.sequences = 2;
  b.seq_len = 5;
  const Random random(7, 77);
  for (int64_t i = 0; i < b.tokens(); ++i) {
    const auto at = static_cast<uint64_t>(3 * i);
    b.inputs.push_back(static_cast<int32_t>(random.below(at, c.vocab)));
    if (!soft) b.targets.push_back(i == 3 ? ignore_index : random.below(at + 1, c.vocab));
    if (soft) {
      b.soft_k = 2;
      b.soft_ids.insert(b.soft_ids.end(), {i % c.vocab, random.below(at + 2, c.vocab)});
      b.soft_probs.insert(b.soft_probs.end(), {0.75f, 0.25f});
    }
  }
  return b;
}

// Worst relative disagreement over all tensors, two random directions each.
void check_gradients(const ModelConfig& config, bool soft, double smoothing) {
  TrainConfig train;
  train.model = config;
  train.label_smoothing = smoothing;
  const auto model = make_model<double>(config, 1);
  const auto loss = make_loss<double>("reference", train, 1);
  const Layout& layout = model->layout();
  std::vector<double> params = initial_parameters<double>(layout, 3);
  std::vector<double> grads(params.size(), 0.0);
  const Batch batch = some_batch(config, soft);
  const LossShare share{0.5, 0, true};
  model->step(grads.data(), params.data(), batch, share, *loss, nullptr);
  auto value = [&] {
    return 0.5 * model->step(nullptr, params.data(), batch, share, *loss, nullptr).loss;
  };
  const Random random(11, 5);
  for (const Slice& s : layout.slices())
    for (uint64_t round = 0; round < 2; ++round) {
      std::vector<double> direction(static_cast<size_t>(s.size()));
      double dot = 0;
      for (int64_t i = 0; i < s.size(); ++i) {
        direction[i] = random.normal(static_cast<uint64_t>(s.offset + i) * 2 + round);
        dot += direction[i] * grads[s.offset + i];
      }
      const std::vector<double> kept = params;
      const double h = 1e-5;
      for (int64_t i = 0; i < s.size(); ++i)
        params[s.offset + i] = kept[s.offset + i] + h * direction[i];
      const double up = value();
      for (int64_t i = 0; i < s.size(); ++i)
        params[s.offset + i] = kept[s.offset + i] - h * direction[i];
      const double down = value();
      params = kept;
      const double difference = (up - down) / (2 * h);
      EXPECT_LE(std::fabs(difference - dot), 1e-7 * std::max(1e-3, std::fabs(dot)))
          << s.name << ": " << difference << " against " << dot;
    }
}

ModelConfig small() {
  ModelConfig c;
  c.vocab = 13;
  c.hidden = 12;
  c.ffn = 10;
  c.heads = 2;
  return c;
}

TEST(TrainModel, GradientsOfTheTransformer) { check_gradients(small(), false, 0.0); }

TEST(TrainModel, GradientsWithSmoothing) { check_gradients(small(), false, 0.1); }

TEST(TrainModel, GradientsWithSoftTargets) { check_gradients(small(), true, 0.0); }

TEST(TrainModel, GradientsOfATiedHead) {
  ModelConfig c = small();
  c.tied = true;
  check_gradients(c, false, 0.0);
}

TEST(TrainModel, GradientsOfTheTinyForm) {
  ModelConfig c = small();
  c.form = "tiny";
  check_gradients(c, false, 0.0);
}

TEST(TrainModel, GradientsOfAnotherMixer) {
  ModelConfig c = small();
  c.mixer = "running-mean";
  check_gradients(c, false, 0.0);
}

}  // namespace
}  // namespace talea::train
