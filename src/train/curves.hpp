// What: a run's curves and how the report groups them.
// Why: a receipt of ten thousand steps must stay small enough to be committed and read.
// Never: decides a verdict: the gates hold the worst value of every step, thinned out or not.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "train/step_checks.hpp"

namespace talea::train {

// NaN and infinities as the strings of a receipt.
nlohmann::json number(double value);

// Every how many steps a curve keeps a point so that it has about `points`; 1 where points is 0.
int64_t curve_stride(int64_t steps, int64_t points);

// The first step, every stride-th and the last.
nlohmann::json curves_of(const std::vector<StepRecord>& steps, const TwinOptions& options,
                         int64_t stride);
// The report's charts: which curves, in what words, on what axis.
nlohmann::json charts_of(const TwinOptions& options);

}  // namespace talea::train
