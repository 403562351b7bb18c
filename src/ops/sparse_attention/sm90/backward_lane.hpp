// What: the backward pass of lane sm90 as lane.cpp calls it.
// Why: passes have plans of their own.
// Never: knows the lane table.
#pragma once

#include "ops/sparse_attention/sharded.hpp"
#include "ops/sparse_attention/sm90/backward_config.hpp"

namespace talea::sparse_attention::sm90 {

Planned plan_backward(const Problem& p, const DeviceFacts& d);
std::vector<std::string> backward_details(const Problem& p, const BackwardConfig& c);
// The device is current, and earlier errors are refused.
void run_backward(const Call& c, const BackwardConfig& config);

}  // namespace talea::sparse_attention::sm90
