// What: one training run: accumulates the micro-steps of a window and updates the parameters.
// Why: candidate, reference and twins are the same class with another precision, lane or flaw.
// Never: draws data or compares itself with another run.
#pragma once

#include <memory>

#include "train/loss.hpp"
#include "train/model.hpp"

namespace talea::train {

// All that a run is, between two micro-steps. A checkpoint is this, bit for bit.
template <typename T>
struct TrainState {
  std::vector<T> params, m, v, grads;
  int64_t step = 0;         // updates done
  int64_t cursor = 0;       // micro-steps drawn
  int64_t window_done = 0;  // micro-steps accumulated in the open window
  double window_loss = 0;
  int64_t window_valid = 0;
  int64_t window_tokens = 0;
};

// What a window is known to hold before its first micro-step.
struct Window {
  int64_t micros = 1;
  int64_t valid = 0;  // targets that count, over all its micro-steps
};

struct StepReport {
  int64_t step = 0;
  double loss = 0, lr = 0, grad_norm = 0, clip = 1;
  int64_t valid = 0, tokens = 0;
};

template <typename T>
class Trainer {
 public:
  // loss: a lane, "auto" or a loss mutant. flaw: another mutant's name, or empty.
  Trainer(const TrainConfig& config, const std::string& loss, std::string flaw,
          int64_t total_steps);

  TrainState<T>& state() { return state_; }
  const TrainState<T>& state() const { return state_; }
  const Layout& layout() const { return model_->layout(); }
  std::string lane() const { return loss_->lane(); }

  HeadResult<T> micro(const Batch& batch, const Window& window, Trace* trace = nullptr);
  // Closes the window: norm, clip, optimizer. Gradients stay readable until the next micro().
  StepReport update();

 private:
  LossShare share(const Window& window) const;

  TrainConfig config_;
  std::string flaw_;
  int64_t total_steps_;
  std::unique_ptr<Model<T>> model_;
  std::unique_ptr<Loss<T>> loss_;
  TrainState<T> state_;
};

}  // namespace talea::train
