// What: one call on whole host tensors, cut into even vocabulary shards and run by many ranks.
// Why: the command line and the trainer hold whole tensors; the cut is theirs, not the operator's.
// Never: used by a lane: unlike the operator it allocates (workspace, copies of shared outputs).
#pragma once

#include <vector>

#include "talea/linear_cross_entropy.hpp"
#include "talea/ranks.hpp"

namespace talea::lce {

struct ShardedCall {
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  bool sequence_parallel = false;  // each rank reads and returns its share of the tokens
  DType dx_sum = DType::f32;       // of the ranks' shares of dX
};

// What every rank tells the others when it is done.
struct ShardFigures {
  int64_t begin = 0, end = 0, stored = 0;  // rows of the vocabulary, and of its weight
  int64_t workspace_bytes = 0, targets_in_partition = 0;
  double ms = 0;
};

struct ShardedResult {
  LinearCrossEntropyProblem problem;  // of this rank
  LinearCrossEntropyResult result;
  std::vector<ShardFigures> ranks;
};

// This rank's part, then the others' rows of dw, db (and dx) as well: every rank ends with all of
// the outputs. same_memory: the ranks are threads that were given the same tensors.
ShardedResult run_shard(const ShardedCall& call, Communicator& vocab, bool same_memory);

// All ranks as threads of this process; the result is that of rank 0.
ShardedResult run_thread_shards(const ShardedCall& call, int ranks,
                                double timeout_s = default_rank_timeout_s);

}  // namespace talea::lce
