// What: what a call of any operator takes and tells beside its tensors.
// Why: every operator hands over its workspace and names its lane in the same words.
// Never: knows an operator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace talea {

// Memory of the caller's for one call, on the device of the tensors; any alignment.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// A lane that did not take a problem, and why.
struct LaneDecline {
  std::string lane;
  std::string reason;
};

// Which lane would take a problem, why the others decline, and what it costs.
struct LaneChoice {
  std::string lane;  // empty: none accepts
  std::string lane_kind;
  std::vector<LaneDecline> declined;
  int64_t workspace_bytes = 0;
  double flops = 0;
  int64_t workspace_limit_bytes = -1;  // what auto chose, or the number given; -1: not said
  std::vector<std::string> details;    // tile, chunk, schedule: one "name = value" a line
};

}  // namespace talea
