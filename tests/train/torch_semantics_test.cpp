// What: every CPU lane against torch's cross-entropy: what is ignored, what divides, what is NaN.
// Why: a trainer that swaps its loss must get torch's numbers for torch's options.
// Never: needs torch: its numbers were written by bench/loss_golden.py.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "talea/linear_cross_entropy.hpp"
#include "train/random.hpp"

namespace talea::train {
namespace {

struct GoldenCase {
  Reduction reduction;
  double smoothing;
  bool weighted, soft;
  const char* ignored;  // "no", "some" or "all" rows
  int64_t ignore_index;
};

#include "loss_golden.inc"

template <typename T>
std::vector<T> drawn(uint64_t seed, int64_t count, double add = 0, double factor = 1) {
  const Random random(seed, 3);
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) {
    const auto steps = static_cast<double>(random.bits(static_cast<uint64_t>(i)) >> 44) - 524288.0;
    values.push_back(static_cast<T>((std::ldexp(steps, -18) + add) * factor));
  }
  return values;
}

std::vector<int64_t> targets_of(const GoldenCase& c) {
  const Random random(103, 3);
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < golden_tokens; ++i) {
    const auto drawn_id = random.bits(static_cast<uint64_t>(i)) % uint64_t{golden_vocab};
    targets.push_back(i == 2 ? 3 : static_cast<int64_t>(drawn_id));
    const std::string ignored = c.ignored;
    if (ignored == "all" || (ignored == "some" && (i == 1 || i == 4)))
      targets.back() = c.ignore_index;
  }
  return targets;
}

std::vector<float> probabilities() {
  const Random random(104, 3);
  std::vector<float> probs(golden_tokens * golden_vocab, 0.0f);
  for (int64_t i = 0; i < golden_tokens; ++i)
    for (int64_t j = 0; j < 16; ++j)
      probs[i * golden_vocab + static_cast<int64_t>(random.bits(static_cast<uint64_t>(16 * i + j)) %
                                                    uint64_t{golden_vocab})] += 1.0f / 16;
  return probs;
}

// Loss, dx and dw of one lane, one behind the other as in the golden values.
template <typename T>
std::vector<double> run(const GoldenCase& c, const std::string& lane) {
  constexpr DType dtype = sizeof(T) == 4 ? DType::f32 : DType::f64;
  const bool rows = c.reduction == Reduction::none;
  const int64_t n = golden_tokens, d = golden_hidden, v = golden_vocab;
  auto x = drawn<T>(101, n * d), w = drawn<T>(102, v * d);
  auto weights = drawn<float>(105, v, 2.25, 0.25);
  auto upstream = drawn<double>(106, n);
  if (!rows) upstream = {golden_upstream};
  auto targets = targets_of(c);
  auto probs = probabilities();
  std::vector<double> loss(rows ? n : 1);
  std::vector<T> dx(n * d), dw(v * d);
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(x.data(), dtype, {n, d});
  in.weight = make_tensor(w.data(), dtype, {v, d});
  if (c.soft)
    in.soft_target_probs = make_tensor(probs.data(), DType::f32, {n, v});
  else
    in.targets = make_tensor(targets.data(), DType::i64, {n});
  if (c.weighted) in.class_weight = make_tensor(weights.data(), DType::f32, {v});
  in.upstream = rows ? make_tensor(upstream.data(), DType::f64, {n})
                     : make_tensor(upstream.data(), DType::f64, {});
  LinearCrossEntropyOutputs out;
  out.loss =
      rows ? make_tensor(loss.data(), DType::f64, {n}) : make_tensor(loss.data(), DType::f64, {});
  out.dx = make_tensor(dx.data(), dtype, {n, d});
  out.dw = make_tensor(dw.data(), dtype, {v, d});
  LinearCrossEntropyOptions options;
  options.lane = lane;
  options.reduction = c.reduction;
  options.label_smoothing = c.smoothing;
  options.ignore_index = c.ignore_index;
  std::vector<char> space(static_cast<size_t>(workspace_bytes(describe(in, out, options))));
  linear_cross_entropy(in, out, options, {space.data(), static_cast<int64_t>(space.size())});
  std::vector<double> all = loss;
  all.insert(all.end(), dx.begin(), dx.end());
  all.insert(all.end(), dw.begin(), dw.end());
  return all;
}

// `relative`: to the largest value of the tensor. Where torch has NaN, so have we, and where a
// tensor of torch's is all zero, ours is exactly that.
void compare(const std::vector<double>& ours, const uint64_t* golden, int64_t losses,
             double relative, const std::string& what) {
  const int64_t ends[] = {losses, losses + golden_tokens * golden_hidden,
                          losses + (golden_tokens + golden_vocab) * golden_hidden};
  const char* names[] = {"loss", "dx", "dw"};
  for (int64_t part = 0, at = 0; part < 3; ++part) {
    double largest = 0;
    for (int64_t i = at; i < ends[part]; ++i)
      if (std::isfinite(std::bit_cast<double>(golden[i])))
        largest = std::max(largest, std::fabs(std::bit_cast<double>(golden[i])));
    for (; at < ends[part]; ++at) {
      const double torch = std::bit_cast<double>(golden[at]);
      if (std::isnan(torch))
        EXPECT_TRUE(std::isnan(ours[at])) << what << names[part] << at;
      else
        EXPECT_TRUE(std::fabs(ours[at] - torch) <= relative * largest)
            << what << names[part] << at << ": " << ours[at] << ", torch " << torch;
    }
  }
}

TEST(TorchSemantics, EveryLaneAgreesInEveryCase) {
  const uint64_t* golden = golden_values;
  int64_t cases = 0, nan_losses = 0;
  for (const GoldenCase& c : golden_cases) {
    const int64_t losses = c.reduction == Reduction::none ? golden_tokens : 1;
    const std::string what = "case " + std::to_string(cases++) + " ";
    compare(run<double>(c, "reference"), golden, losses, 1e-14, what + "reference fp64 ");
    for (const char* lane : {"reference", "unfused", "cpu"})
      compare(run<float>(c, lane), golden, losses, 1e-6, what + lane + " fp32 ");
    nan_losses += std::isnan(std::bit_cast<double>(golden[0]));
    golden += losses + (golden_tokens + golden_vocab) * golden_hidden;
  }
  EXPECT_EQ(golden, std::end(golden_values));  // nothing was left out
  EXPECT_EQ(nan_losses, 2);                    // an empty mean, with and without smoothing
}

}  // namespace
}  // namespace talea::train
