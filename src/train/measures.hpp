// What: what is measured of one step: same-state errors, drifts, and the tables of their fields.
// Why: journal, receipt and verdict walk one list of fields, so that none is forgotten in one.
// Never: judges a value.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "train/compare.hpp"
#include "train/trainer.hpp"

namespace talea::train {

// One step against an fp64 step from the candidate's own state.
struct SameState {
  double loss = 0, logits = 0, lse = 0, logp = 0;
  double grads = 0, norm = 0;                      // of the window, before clipping
  double clip = 0, clipped = 0, clipped_norm = 0;  // the scale, and what it left
  double params = 0, m = 0, v = 0;                 // after the update
  std::string worst_tensor;                        // of grads
};

// A free-running run against the free-running fp64 reference.
struct Drift {
  double loss = 0, logits = 0, grads = 0, norm = 0, clip = 0;  // grads: after clipping
  double params_before = 0, m_before = 0, v_before = 0;        // the state the step began with
  double params = 0, m = 0, v = 0;                             // and what it left
};

template <typename D>
struct Field {
  const char* name;
  double D::*value;
};

inline constexpr Field<SameState> same_fields[] = {
    {"loss", &SameState::loss},
    {"logits", &SameState::logits},
    {"lse", &SameState::lse},
    {"logp", &SameState::logp},
    {"grads", &SameState::grads},
    {"norm", &SameState::norm},
    {"clip", &SameState::clip},
    {"clipped", &SameState::clipped},
    {"clipped_norm", &SameState::clipped_norm},
    {"params", &SameState::params},
    {"m", &SameState::m},
    {"v", &SameState::v},
};

inline constexpr Field<Drift> drift_fields[] = {
    {"loss", &Drift::loss},
    {"logits", &Drift::logits},
    {"grads", &Drift::grads},
    {"norm", &Drift::norm},
    {"clip", &Drift::clip},
    {"params_before", &Drift::params_before},
    {"m_before", &Drift::m_before},
    {"v_before", &Drift::v_before},
    {"params", &Drift::params},
    {"m", &Drift::m},
    {"v", &Drift::v},
};

// A window of one run: its report and its logits [tokens of the window, vocab].
template <typename T>
struct Taken {
  StepReport report;
  std::vector<T> logits;
};

// The micro-steps of a window, not yet clipped and applied.
template <typename T>
struct OpenStep {
  std::vector<HeadResult<T>> heads;
  std::vector<T> logits;  // of logits_of
};

template <typename T>
OpenStep<T> open_step(Trainer<T>& run, const std::vector<Batch>& batches, const Window& window);

// The fields of `s` that are settled before clipping, and those after the update.
template <typename T>
void before_clipping(SameState& s, const Trainer<T>& run, const OpenStep<T>& mine,
                     const Trainer<double>& probe, const OpenStep<double>& truth);
template <typename T>
void after_update(SameState& s, const Trainer<T>& run, const StepReport& mine,
                  const Trainer<double>& probe, const StepReport& truth);

// A plain product of what the head was given and its weights, outside the operator, which never
// holds logits. Before the update: with the weights of the step.
template <typename T>
std::vector<T> logits_of(const Trainer<T>& run, const std::vector<HeadResult<T>>& heads,
                         const TrainConfig& config);

// All micro-steps of the window and the update.
template <typename T>
Taken<T> take_step(Trainer<T>& run, const std::vector<Batch>& batches, const Window& window,
                   const TrainConfig& config);

// params_before, m_before and v_before; before the step.
template <typename T>
Drift drift_before(const Trainer<T>& run, const Trainer<double>& reference);

// Completes `before` when both have taken the step.
template <typename T>
Drift drift_after(Drift before, const Trainer<T>& run, const Taken<T>& mine,
                  const Trainer<double>& reference, const Taken<double>& theirs);

// The larger value of each field; NaN wins.
void widen(double& band, double value);
void widen(Drift& band, const Drift& drift);

}  // namespace talea::train
