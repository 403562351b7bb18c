// What: outputs that host lanes write alike: zeros of padding, gradients of the parameters.
// Why: padding is never read and its outputs are exact zeros, on every lane.
// Never: computes; what is written was summed by the lane.
#pragma once

#include "ops/mamba3/contract.hpp"

namespace talea::mamba3 {

// Zeros in out and in the gradients of tokens that belong to no sequence (a step: skipped entries).
// ends: of read_sequences().
void clear_padding(const Call& c, const int64_t* ends);

// [H, R (2 N + 3 P) + P + 1] sums of a head: q_bias, k_bias [R, N]; mimo_v, mimo_z, mimo_out
// [R, P]; norm_weight [P]; d. Rounded once, or added where the call accumulates.
inline int64_t parameter_count(const Problem& p) {
  return p.rank * (2 * p.state_dim + 3 * p.head_dim) + p.head_dim + 1;
}
void store_parameters(const Call& c, const double* sums);

}  // namespace talea::mamba3
