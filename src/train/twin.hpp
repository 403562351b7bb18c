// What: candidate, reference and noise twins trained side by side, compared at every step.
// Why: a single step cannot show a drift, and a drift means nothing without its noise band.
// Never: lets one run's numbers into another; they share weights, data and rules only.
#pragma once

#include <functional>
#include <optional>

#include "train/measures.hpp"
#include "train/stream.hpp"

namespace talea::train {

// A lane that trains beside the candidate, from the same unmoved weights; "reference" is the base.
struct Beside {
  std::string lane;
  double loss = 0, drift_loss = 0, drift_params = 0;
};

struct StepRecord {
  StepReport candidate, reference;
  double twin_loss = 0;
  SameState same;     // the candidate's step, against fp64 from its own state
  SameState plain;    // the same step in fp32 with the reference lane: what fp32 costs here
  Drift drift, band;  // of the candidate and, the largest, of the twins against the fp64 reference
  double apart = 0, apart_band = 0;  // parameters of candidate and twins against the fp32 base
  double params_moved = 0;           // ||params - initial|| / ||initial|| of the candidate
  double seconds = 0;                // of the candidate alone
  std::string lane;
  std::vector<Beside> beside;
};

struct TwinOptions {
  // fp32 runs with the reference lane whose initial weights are moved by one ulp. With any, a base
  // run (the same, not moved) is trained too.
  int twins = 2;
  bool same_state = true;           // fp64 steps from the candidate's state at every step
  std::vector<std::string> beside;  // further lanes to train side by side
  std::string mutant;               // empty: the candidate is config.loss_lane
  int64_t plant_nan_at = -1;  // step whose candidate loss is made NaN (to prove that gates see it)
};

class TwinRun {
 public:
  TwinRun(const TrainConfig& config, const Corpus& corpus, const TwinOptions& options);

  int64_t total_steps() const { return total_steps_; }
  bool done() const { return candidate_.state().step >= total_steps_; }
  StepRecord step();

  Trainer<float>& candidate() { return candidate_; }
  Trainer<double>& reference() { return reference_; }
  // The base run and then the twins (none without twins), then the lanes beside.
  std::vector<Trainer<float>>& others() { return others_; }
  // The first stage and tensor of the last step in which the candidate leaves fp64 by more than
  // `tolerance` relative L2. Where none does, the one that differs most, and that it is within.
  std::string localise(double tolerance);

 private:
  // The candidate's own step, timed; `same` and `plain` are filled on the way.
  Taken<float> candidate_step(const std::vector<Batch>& batches, const Window& window,
                              StepRecord& record);
  void other_steps(const std::vector<Batch>& batches, const Window& window,
                   const std::vector<Drift>& before, const Taken<double>& theirs,
                   StepRecord& record);
  bool has_base() const { return options_.twins > 0; }

  TrainConfig config_;
  TwinOptions options_;
  Stream stream_;
  int64_t total_steps_;
  Trainer<float> candidate_;
  Trainer<double> reference_, probe_;
  Trainer<float> plain_;
  std::vector<Trainer<float>> others_;
  std::vector<float> initial_;
  std::optional<TrainState<float>> before_;  // the candidate's state before the last step
};

int64_t planned_steps(const TrainConfig& config, const Stream& stream);

// Moves every value to a neighbour, up or down by the seed.
void move_one_ulp(std::vector<float>& values, uint64_t seed);

template <typename To, typename From>
void copy_state(TrainState<To>& to, const TrainState<From>& from) {
  to.params.assign(from.params.begin(), from.params.end());
  to.m.assign(from.m.begin(), from.m.end());
  to.v.assign(from.v.begin(), from.v.end());
  to.grads.assign(from.grads.begin(), from.grads.end());
  to.step = from.step;
  to.cursor = from.cursor;
  to.window_done = from.window_done;
  to.window_loss = from.window_loss;
  to.window_valid = from.window_valid;
  to.window_tokens = from.window_tokens;
}

}  // namespace talea::train
