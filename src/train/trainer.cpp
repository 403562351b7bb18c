// What: the window's arithmetic: both accumulation rules, clipping and the update.
// Why: a missing 1/K or a wrong divisor is decided in this file and nowhere else.
// Never: hides a value that is not finite.
#include "train/trainer.hpp"

#include <algorithm>

#include "train/optimizer.hpp"

namespace talea::train {

template <typename T>
Trainer<T>::Trainer(const TrainConfig& config, const std::string& loss, std::string flaw,
                    int64_t total_steps)
    : config_(config),
      flaw_(std::move(flaw)),
      total_steps_(total_steps),
      model_(make_model<T>(config.model, config.threads)),
      loss_(make_loss<T>(loss, config, config.threads)) {
  check_optimizer(config.optimizer);
  state_.params = initial_parameters<T>(layout(), config.seed);
  const auto count = static_cast<size_t>(layout().size());
  state_.m.assign(count, T(0));
  state_.v.assign(count, T(0));
  state_.grads.assign(count, T(0));
}

template <typename T>
LossShare Trainer<T>::share(const Window& window) const {
  LossShare share;
  share.empty_is_zero = true;  // an all-ignored micro-step adds nothing to its window
  const bool by_tokens = config_.accumulation == Accumulation::total_tokens;
  if (by_tokens && flaw_ != "mean-of-means")
    share.denominator = static_cast<double>(window.valid);  // 0: an empty window, gradient 0
  else if (flaw_ != "missing-1-over-k")
    share.upstream = 1.0 / static_cast<double>(window.micros);
  return share;
}

template <typename T>
HeadResult<T> Trainer<T>::micro(const Batch& batch, const Window& window, Trace* trace) {
  if (state_.window_done == 0) {
    std::fill(state_.grads.begin(), state_.grads.end(), T(0));
    state_.window_loss = 0;
    state_.window_valid = 0;
    state_.window_tokens = 0;
  }
  const LossShare part = share(window);
  HeadResult<T> result =
      model_->step(state_.grads.data(), state_.params.data(), batch, part, *loss_, trace);
  state_.window_loss += part.upstream * result.loss;
  state_.window_valid += batch.valid();
  state_.window_tokens += batch.tokens();
  ++state_.window_done;
  ++state_.cursor;
  return result;
}

template <typename T>
StepReport Trainer<T>::update() {
  StepReport r;
  r.step = ++state_.step;
  r.loss = state_.window_loss;
  r.valid = state_.window_valid;
  r.tokens = state_.window_tokens;
  r.lr = learning_rate(config_.optimizer, r.step, total_steps_);
  r.grad_norm = gradient_norm(state_.grads);
  r.clip = clip_scale(r.grad_norm, config_.optimizer.clip_norm);
  if (r.clip != 1.0)
    for (T& g : state_.grads) g = static_cast<T>(double(g) * r.clip);
  optimizer_step(config_.optimizer, flaw_, r.lr, r.step, layout().size(), state_.params.data(),
                 state_.m.data(), state_.v.data(), state_.grads.data());
  state_.window_done = 0;
  return r;
}

template class Trainer<float>;
template class Trainer<double>;

}  // namespace talea::train
