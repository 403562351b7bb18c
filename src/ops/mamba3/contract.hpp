// What: the checks of the scan's contract, its sequences, and the views that lanes read.
// Why: every lane starts from the same checked problem.
// Never: computes a state.
#pragma once

#include "ops/mamba3/lane.hpp"

namespace talea::mamba3 {

// The tensors with their full number of axes (lane.hpp). describe() has accepted them.
struct FullAxes {
  Inputs in;
  Outputs out;
};
FullAxes full_axes(const Problem& p, const Inputs& in, const Outputs& out);

// The arguments of a step as those of a call of one token whose sequences are its entries.
Inputs step_inputs(const StepArguments& a);
Outputs step_outputs(const StepArguments& a);

// Tokens [begin, end) of batch entry `batch`, and the row of the state tensors.
struct Sequence {
  int64_t batch = 0, begin = 0, end = 0, row = 0;
  int64_t tokens() const { return end - begin; }
};

// Host: entries of cu_seqlens and slots as the options say. `ends` has room for sequences + 1
// numbers and gets the entries in use; throws under `checked`, counts into result and `status`
// under `clamp`. A step: the row of each entry or -1 in `ends`.
void read_sequences(const Call& c, int64_t* ends);
Sequence sequence_of(const Problem& p, const int64_t* ends, int64_t n);

// The least options.workspace_limit_bytes that the lane which would run can keep.
int64_t least_workspace_limit(const Problem& problem);

inline bool has_d_final(const Inputs& in) {
  const States& d = in.d_final_states;
  return d.angle || d.ssm || d.k || d.v;
}

}  // namespace talea::mamba3
