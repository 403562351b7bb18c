// What: a twin run from start to verdict, with checkpoints and a journal of its steps.
// Why: the command line, the gates and the tests drive one loop.
// Never: prints; a callback sees every step.
#pragma once

#include <functional>

#include "train/checkpoint.hpp"
#include "train/record.hpp"

namespace talea::train {

struct RunOptions {
  TrainConfig config;
  TwinOptions twin;
  Tolerances tolerances;
  std::string checkpoint_dir;  // empty: none
  bool resume = false;         // from checkpoint_dir, where it holds a checkpoint
  int64_t checkpoint_every = 1;
  int64_t curve_points = 0;            // RunFacts::curve_points
  std::string initial_parameters_out;  // written before the first step; empty: not
};

struct RunResult {
  RunFacts facts;
  std::vector<StepRecord> steps;  // of resumed parts too
  StepChecks checks;
  bool stopped = false;  // by the callback
  bool passed() const { return checks.passed(); }
};

// Called after every step (and once at once after a resume, with the last step's record). Returns
// false to stop after this step; the state is checkpointed first.
using OnStep = std::function<bool(const StepRecord&, const StepChecks&, int64_t total_steps)>;

RunResult run_training(const RunOptions& options, const OnStep& on_step);

}  // namespace talea::train
