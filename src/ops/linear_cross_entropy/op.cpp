// What: the lane table of linear cross-entropy, and its public functions.
// Why: one table serves the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <array>

#include "ops/linear_cross_entropy/contract.hpp"
#include "ops/linear_cross_entropy/fields.hpp"
#include "ops/linear_cross_entropy/handshake.hpp"

namespace talea {

std::span<const lce::Lane> lce::Operator::lanes() {
  static const std::array<Lane, 5> table = {sm90_lane(), cuda_lane(), cpu_lane(), unfused_lane(),
                                            reference_lane()};
  return table;
}

LinearCrossEntropyProblem describe(const LinearCrossEntropyInputs& inputs,
                                   const LinearCrossEntropyOutputs& outputs,
                                   const LinearCrossEntropyOptions& options,
                                   const LinearCrossEntropyRanks& ranks) {
  return lce::describe(inputs, outputs, options, ranks);
}

int64_t workspace_bytes(const LinearCrossEntropyProblem& problem) {
  return prepare<lce::Operator>(problem).plan.workspace_bytes;
}

LaneChoice explain(const LinearCrossEntropyProblem& problem) {
  return explain<lce::Operator>(problem);
}

std::vector<std::string> linear_cross_entropy_lanes() { return lane_names<lce::Operator>(); }

LinearCrossEntropyResult linear_cross_entropy(const LinearCrossEntropyInputs& inputs,
                                              const LinearCrossEntropyOutputs& outputs,
                                              const LinearCrossEntropyOptions& options,
                                              Workspace workspace,
                                              const LinearCrossEntropyRanks& ranks, Stream stream) {
  const lce::Problem problem = lce::describe(inputs, outputs, options, ranks);
  Communicator& vocab = ranks.vocab ? *ranks.vocab : self_communicator();
  Communicator& batch = ranks.batch ? *ranks.batch : self_communicator();
  return call<lce::Operator>(problem, workspace, lce::memory_of(inputs, outputs),
                             [&](const Prepared<lce::Operator>& ready, lce::Result& result) {
                               if (ranks.handshake) {
                                 lce::shake_hands(problem, inputs, ready.lane->name, vocab, result);
                                 lce::shake_batch_hands(problem, inputs, batch, result);
                               }
                               ready.lane->run({problem, ready.device, inputs, outputs, workspace,
                                                vocab, batch, stream, result},
                                               ready.plan);
                             });
}

}  // namespace talea
