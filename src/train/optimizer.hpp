// What: AdamW and SGD on flat buffers, global-norm clipping and learning-rate schedules.
// Why: hyper-parameters and arithmetic are double, state is the model's type, one rounding each.
// Never: knows names of tensors; decay is decoupled and hits every parameter, as torch's default.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/config.hpp"

namespace talea::train {

// Error(usage) naming the number that no update rule has a meaning for.
void check_optimizer(const OptimizerConfig& config);

// step counts from 1. `m` is the momentum buffer of SGD; `v` is untouched by SGD.
// flaw: a mutant's name (variants.hpp), or empty.
template <typename T>
void optimizer_step(const OptimizerConfig& config, const std::string& flaw, double lr, int64_t step,
                    int64_t count, T* params, T* m, T* v, const T* grads);

// The 2-norm over all gradients, summed in fp64 in one order.
template <typename T>
double gradient_norm(const std::vector<T>& grads);

// torch's rule: min(1, clip_norm / (norm + 1e-6)); 1 where clipping is off. NaN stays NaN.
double clip_scale(double norm, double clip_norm);

// The rate of `step` (from 1) in a run of total_steps.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t total_steps);

}  // namespace talea::train
