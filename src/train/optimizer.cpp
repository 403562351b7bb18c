// What: the update rules, written as in Loshchilov and Hutter (2019) and torch.optim.AdamW.
// Why: parity with torch's optimizer is a gate of its own.
// Never: fuses two updates into one rounding that the rule keeps apart.
#include "train/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "core/fail.hpp"

namespace talea::train {
namespace {

struct AdamTerms {
  double decay, beta1, beta2, one_minus1, one_minus2, step_size, root_correction, eps, coupled;
};

AdamTerms adam_terms(const OptimizerConfig& c, const std::string& flaw, double lr, int64_t step) {
  AdamTerms a{};
  const bool coupled = flaw == "coupled-decay", uncorrected = flaw == "no-bias-correction";
  a.decay = coupled ? 1.0 : 1.0 - lr * c.weight_decay;
  a.coupled = coupled ? c.weight_decay : 0.0;
  a.beta1 = c.beta1;
  a.beta2 = c.beta2;
  a.one_minus1 = 1.0 - c.beta1;
  a.one_minus2 = 1.0 - c.beta2;
  if (flaw == "float-hyper") {
    a.beta1 = static_cast<float>(c.beta1);
    a.beta2 = static_cast<float>(c.beta2);
    a.one_minus1 = 1.0f - static_cast<float>(c.beta1);
    a.one_minus2 = 1.0f - static_cast<float>(c.beta2);
  }
  const auto n = static_cast<double>(step);
  a.step_size = lr / (uncorrected ? 1.0 : 1.0 - std::pow(a.beta1, n));
  a.root_correction = std::sqrt(uncorrected ? 1.0 : 1.0 - std::pow(a.beta2, n));
  a.eps = c.eps;
  return a;
}

}  // namespace

void check_optimizer(const OptimizerConfig& c) {
  for (const auto& [name, value] :
       {std::pair("lr", c.lr), std::pair("min-lr", c.min_lr), std::pair("eps", c.eps),
        std::pair("weight-decay", c.weight_decay), std::pair("clip", c.clip_norm)})
    require(value >= 0 && std::isfinite(value), ErrorKind::usage,
            "{} = {}: must be finite and >= 0", name, value);
  for (const auto& [name, value] : {std::pair("beta1", c.beta1), std::pair("beta2", c.beta2),
                                    std::pair("momentum", c.momentum)})
    require(value >= 0 && value < 1, ErrorKind::usage, "{} = {}: must lie in [0, 1)", name, value);
  require(c.warmup_steps >= 0, ErrorKind::usage, "warmup-steps = {}: must be >= 0", c.warmup_steps);
}

template <typename T>
void optimizer_step(const OptimizerConfig& c, const std::string& flaw, double lr, int64_t step,
                    int64_t count, T* params, T* m, T* v, const T* grads) {
  if (c.kind == OptimizerKind::sgd) {
    for (int64_t i = 0; i < count; ++i) {
      const double g = double(grads[i]) + c.weight_decay * double(params[i]);
      // torch: the first step's buffer is the gradient itself.
      const double buffer = step == 1 ? g : c.momentum * double(m[i]) + g;
      if (c.momentum != 0) m[i] = static_cast<T>(buffer);
      params[i] = static_cast<T>(double(params[i]) - lr * (c.momentum != 0 ? buffer : g));
    }
    return;
  }
  const AdamTerms a = adam_terms(c, flaw, lr, step);
  for (int64_t i = 0; i < count; ++i) {
    const double g = double(grads[i]) + a.coupled * double(params[i]);
    m[i] = static_cast<T>(a.beta1 * double(m[i]) + a.one_minus1 * g);
    v[i] = static_cast<T>(a.beta2 * double(v[i]) + a.one_minus2 * g * g);
    const double root = std::sqrt(double(v[i])) / a.root_correction + a.eps;
    params[i] = static_cast<T>(double(params[i]) * a.decay - a.step_size * double(m[i]) / root);
  }
}

template <typename T>
double gradient_norm(const std::vector<T>& grads) {
  double squares = 0;
  for (const T g : grads) squares += double(g) * double(g);
  return std::sqrt(squares);
}

double clip_scale(double norm, double clip_norm) {
  if (clip_norm <= 0) return 1.0;
  const double scale = clip_norm / (norm + 1e-6);
  return scale >= 1.0 ? 1.0 : scale;
}

double learning_rate(const OptimizerConfig& c, int64_t step, int64_t total_steps) {
  if (step <= c.warmup_steps) return c.lr * double(step) / double(c.warmup_steps);
  if (c.schedule == Schedule::constant) return c.lr;
  const int64_t end = c.schedule_steps > 0 ? c.schedule_steps : total_steps;
  const double span = double(std::max<int64_t>(1, end - c.warmup_steps));
  const double done = std::min(1.0, double(step - c.warmup_steps) / span);
  const double left =
      c.schedule == Schedule::linear ? 1.0 - done : 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return c.min_lr + (c.lr - c.min_lr) * left;
}

template void optimizer_step(const OptimizerConfig&, const std::string&, double, int64_t, int64_t,
                             float*, float*, float*, const float*);
template void optimizer_step(const OptimizerConfig&, const std::string&, double, int64_t, int64_t,
                             double*, double*, double*, const double*);
template double gradient_norm(const std::vector<float>&);
template double gradient_norm(const std::vector<double>&);

}  // namespace talea::train
