// What: what a lane of this operator gets, and the lanes there are.
// Why: one table, best first, reference last; each lane accepts a problem or says why not.
// Never: includes a header of CUDA, oneDNN, MPI or NCCL.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/operator.hpp"
#include "ops/linear_cross_entropy/rows/finish.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::lce {

using Inputs = LinearCrossEntropyInputs;
using Outputs = LinearCrossEntropyOutputs;
using Options = LinearCrossEntropyOptions;
using Problem = LinearCrossEntropyProblem;
using Ranks = LinearCrossEntropyRanks;
using Result = LinearCrossEntropyResult;

// Everything a lane gets. All checks of contract.hpp have passed; the workspace is large enough.
struct Call {
  const Problem& problem;
  const DeviceFacts& device;
  const Inputs& in;
  const Outputs& out;
  Workspace workspace;
  Communicator& vocab;  // ranks of the vocabulary (and of the sequence)
  Communicator& batch;  // ranks of the batch
  Stream stream;
  Result& result;  // the lane fills what it knows
};

inline bool sums_dx_in_bf16(const Problem& p) {
  return p.world > 1 && p.wants_dx && p.dx_sum == DType::bf16;
}

struct Operator {
  using Problem = lce::Problem;
  using Call = lce::Call;
  using Result = lce::Result;
  // Best first, reference last. Lanes not built are in the table and decline with "not built".
  static std::span<const talea::Lane<Operator>> lanes();
  // The problem with its limit as a number: auto is chosen here. A call goes by the room that it
  // was given.
  static Problem limited(const talea::Lane<Operator>& lane, const Problem& p,
                         const DeviceFacts& device, const Workspace* given);
  // All that counts against the limit: the workspace, and what waits for a late factor.
  static int64_t taken(const talea::Lane<Operator>& lane, const Problem& p,
                       const DeviceFacts& device, const Planned& plan);
};
using Lane = talea::Lane<Operator>;

// Of one product of [tokens, hidden] and the weight.
inline double product_flops_of_one(const Problem& p) {
  return 2.0 * static_cast<double>(p.tokens) * static_cast<double>(p.hidden) *
         static_cast<double>(p.vocab_local);
}
// Of the logits, and of dX and dW where they are wanted.
inline double product_flops(const Problem& p) {
  return product_flops_of_one(p) * (1 + (p.wants_dx ? 1 : 0) + (p.wants_dw ? 1 : 0));
}

Lane reference_lane();
Lane unfused_lane();
Lane cpu_lane();
Lane cuda_lane();
Lane sm90_lane();

}  // namespace talea::lce
