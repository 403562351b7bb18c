// What: the gates that are not twin runs: finite differences, torch's optimizer, replay.
// Why: gradients, update rule and reproducibility each have a truth of their own.
// Never: takes its truth from the code it examines.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "core/fail.hpp"
#include "train/gates.hpp"
#include "train/optimizer.hpp"
#include "train/presets.hpp"
#include "train/random.hpp"

namespace talea::train {
namespace {

Check as_check(const std::string& name, const Worst& w) {
  return {name, w.worst(), w.tolerance(), w.worst_step(), w.first_past(), w.seen(), w.passed()};
}

#include "train/adamw_golden.inc"

void raise(double& largest, double value) {
  if (!std::isnan(largest) && !(value <= largest)) largest = value;
}

// Gradient i of step s, exactly representable in fp32: the script draws the same.
float golden_gradient(int64_t size, int64_t step, int64_t i) {
  const Random random(static_cast<uint64_t>(size), 3);
  const auto at = static_cast<uint64_t>(step * size + i);
  const auto steps = static_cast<double>(random.bits(at) >> 44) - 524288.0;  // 20 bits
  return static_cast<float>(std::ldexp(steps, -20 - static_cast<int>(i % 7) * 3));
}

// |a - b| in units of the last fp32 place of a value of size `scale`.
double ulps(double a, double b, double scale) {
  const auto at = static_cast<float>(scale);
  return std::fabs(a - b) / (double(std::nextafter(at, INFINITY)) - double(at));
}

// The end of an fp64 model through a lane that takes fp32: what it is given is rounded to fp32
// once, and so is what it gives back.
class ThroughFp32 : public Loss<double> {
 public:
  explicit ThroughFp32(std::unique_ptr<Loss<float>> lane) : lane_(std::move(lane)) {}
  std::string lane() const override { return lane_->lane(); }

  HeadResult<double> run(const HeadCall<double>& call) override {
    const int64_t rows = call.tokens * call.hidden, words = call.vocab * call.hidden;
    const std::vector<float> x(call.x, call.x + rows), w(call.w, call.w + words);
    std::vector<float> dx(call.dx ? rows : 0), dw(call.dw ? words : 0);
    const HeadResult<float> said = lane_->run({.tokens = call.tokens,
                                               .hidden = call.hidden,
                                               .vocab = call.vocab,
                                               .x = x.data(),
                                               .w = w.data(),
                                               .batch = call.batch,
                                               .share = call.share,
                                               .dx = call.dx ? dx.data() : nullptr,
                                               .dw = call.dw ? dw.data() : nullptr});
    for (size_t i = 0; i < dx.size(); ++i) call.dx[i] = dx[i];
    for (size_t i = 0; i < dw.size(); ++i) call.dw[i] += dw[i];
    HeadResult<double> result;
    result.loss = said.loss;
    result.lse.assign(said.lse.begin(), said.lse.end());
    result.logp.assign(said.logp.begin(), said.logp.end());
    result.hidden.assign(said.hidden.begin(), said.hidden.end());
    return result;
  }

 private:
  std::unique_ptr<Loss<float>> lane_;
};

// Worst relative disagreement of one model's gradients with central differences of the fp64 loss.
// The gradients are those of `lane`: of the reference in fp64, or of a lane in fp32, which may be
// off by the rounding of what it is given (a few 2^-24 a term, thousandfold below any wrong term).
void examine_model(const ModelConfig& model_config, const GateContext& g, const std::string& lane,
                   const char* name, std::vector<Check>& checks) {
  TrainConfig c;
  c.model = model_config;
  const auto model = make_model<double>(c.model, 1);
  const bool exact = lane == "reference";
  const auto loss = make_loss<double>("reference", c, 1);
  const auto examined = is_loss_mutant(g.mutant) ? make_loss<double>(g.mutant, c, 1)
                        : exact                  ? make_loss<double>("reference", c, 1)
                                : std::make_unique<ThroughFp32>(make_loss<float>(lane, c, 1));
  const Layout& layout = model->layout();
  std::vector<double> params = initial_parameters<double>(layout, g.seed);
  std::vector<double> grads(params.size(), 0.0);
  Batch batch;
  batch.sequences = 2;
  batch.seq_len = 6;
  const Random draw(g.seed, 4);
  for (int64_t i = 0; i < batch.tokens(); ++i) {
    const auto at = static_cast<uint64_t>(2 * i);
    batch.inputs.push_back(static_cast<int32_t>(draw.below(at, c.model.vocab)));
    batch.targets.push_back(i % 5 == 3 ? ignore_index : draw.below(at + 1, c.model.vocab));
  }
  const LossShare share{0.25, 0, true};
  model->step(grads.data(), params.data(), batch, share, *examined, nullptr);
  auto value = [&](int64_t offset, const std::vector<double>& direction, double h) {
    std::vector<double> moved = params;
    for (size_t i = 0; i < direction.size(); ++i) moved[offset + i] += h * direction[i];
    return 0.25 * model->step(nullptr, moved.data(), batch, share, *loss, nullptr).loss;
  };
  for (const Slice& s : layout.slices()) {
    Worst worst(exact ? 1e-7 : 2e-6);
    for (uint64_t round = 0; round < 3; ++round) {
      std::vector<double> direction(static_cast<size_t>(s.size()));
      double dot = 0, length = 0;
      for (int64_t i = 0; i < s.size(); ++i) {
        direction[i] = draw.normal(1000 + static_cast<uint64_t>(s.offset + i) * 3 + round);
        dot += direction[i] * grads[s.offset + i];
        length += grads[s.offset + i] * grads[s.offset + i];
      }
      // Fourth order in h: truncation and rounding both lie far below the tolerance.
      const double h = 3e-4;
      const double central =
          (8 * (value(s.offset, direction, h) - value(s.offset, direction, -h)) -
           (value(s.offset, direction, 2 * h) - value(s.offset, direction, -2 * h))) /
          (12 * h);
      worst.see(std::fabs(central - dot) / std::max(std::sqrt(length), std::fabs(dot)),
                static_cast<int64_t>(round));
    }
    checks.push_back(as_check(fmt::format("{}, lane {}: {}", name, lane, s.name), worst));
  }
}

bool same_bits(const TrainState<float>& a, const TrainState<float>& b) {
  auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
  };
  return same(a.params, b.params) && same(a.m, b.m) && same(a.v, b.v) && same(a.grads, b.grads) &&
         a.step == b.step && a.cursor == b.cursor;
}

TrainState<float> replay(const GateContext& g, const Corpus& corpus, int threads) {
  TrainConfig c = preset("smoke");
  c.data.text_files = g.text_files;
  c.data.stream = g.stream.empty() ? "text" : g.stream;
  c.model.vocab = 512;
  c.model.hidden = 96;
  c.model.ffn = 192;
  c.data.batch = 16;  // large enough for the products to be shared between threads
  c.max_steps = 3;
  c.grad_accum = 2;
  c.seed = g.seed;
  c.threads = threads;
  c.loss_lane = g.loss_lane;
  TwinOptions o;
  o.twins = 0;
  o.same_state = false;
  o.mutant = g.mutant;
  TwinRun run(c, corpus, o);
  while (!run.done()) run.step();
  return run.candidate().state();
}

}  // namespace

GateResult optimizer_parity(const GateContext& g) {
  GateResult result;
  result.name = "optimizer_parity";
  OptimizerConfig c;
  c.lr = golden_lr;
  c.weight_decay = golden_decay;
  const char* names[] = {"parameters", "m", "v"};
  size_t at = 0;
  for (int64_t size : golden_sizes) {
    std::vector<float> p(size), m(size), v(size), grads(size);
    for (int64_t i = 0; i < size; ++i) p[i] = golden_gradient(size, 0, i);
    // torch in fp64 is the truth, torch in fp32 the yardstick: it rounds the hyper-parameters and
    // every intermediate, so that its own distance is what fp32 costs there.
    double mine_worst[3] = {}, torch_worst[3] = {};
    for (int64_t step = 1, next = 0; next < golden_count; ++step) {
      for (int64_t i = 0; i < size; ++i) grads[i] = golden_gradient(size, step, i);
      optimizer_step(c, g.mutant, c.lr, step, size, p.data(), m.data(), v.data(), grads.data());
      if (step != golden_steps[next]) continue;
      ++next;
      for (int k = 0; k < 3; ++k)
        for (int64_t i = 0; i < size; ++i, ++at) {
          const double truth = std::bit_cast<double>(golden_fp64[at]);
          const float torch = std::bit_cast<float>(golden_fp32[at]);
          const float mine = k == 0 ? p[i] : k == 1 ? m[i] : v[i];
          // Where a value cancels, its last place is that of what was added up.
          const double floor = k == 0 ? 0.01 : k == 1 ? std::ldexp(0.125, -3 * int(i % 7)) : 0.0;
          const double scale = std::max(std::fabs(truth), floor);
          raise(mine_worst[k], ulps(mine, truth, scale));
          raise(torch_worst[k], ulps(torch, truth, scale));
        }
    }
    for (int k = 0; k < 3; ++k) {
      Worst worst(torch_worst[k] + 2);
      worst.see(mine_worst[k], golden_steps[golden_count - 1]);
      result.checks.push_back(as_check(fmt::format("size {}: {}, ulp", size, names[k]), worst));
    }
  }
  return result;
}

GateResult fd_gradients(const GateContext& g) {
  GateResult result;
  result.name = "fd_gradients";
  std::vector<std::string> lanes = {"reference", "unfused", "cpu"};
  const std::string& asked = g.loss_lane;
  if (asked != "auto" && std::find(lanes.begin(), lanes.end(), asked) == lanes.end())
    lanes.push_back(asked);
  if (is_loss_mutant(g.mutant)) lanes = {"reference"};  // the mutant is a loss of its own
  for (const std::string& lane : lanes) {
    ModelConfig c;
    c.vocab = 19;
    c.hidden = 12;
    c.ffn = 10;
    c.heads = 2;
    examine_model(c, g, lane, "transformer", result.checks);
    c.tied = true;
    examine_model(c, g, lane, "tied head", result.checks);
    c.tied = false;
    c.mixer = "running-mean";
    examine_model(c, g, lane, "running mean", result.checks);
    c.form = "tiny";
    examine_model(c, g, lane, "tiny", result.checks);
  }
  return result;
}

GateResult replay_determinism(const GateContext& g) {
  GateResult result;
  result.name = "replay_determinism";
  const Corpus corpus = read_corpus(g.text_files);
  const TrainState<float> first = replay(g, corpus, 1);
  for (int threads : {1, 2, 3, 5}) {
    Worst differs(0);
    differs.see(same_bits(first, replay(g, corpus, threads)) ? 0 : 1, threads);
    result.checks.push_back(
        as_check(fmt::format("1 thread against {}: states that differ", threads), differs));
  }
  return result;
}

}  // namespace talea::train
