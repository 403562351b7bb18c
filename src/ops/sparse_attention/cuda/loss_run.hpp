// What: the index loss of lane cuda over chunks of queries.
// Why: one class holds what a call's chunks share: tables, plan, buffers, stream.
// Never: allocates; synchronises only under IndexCheck::checked.
#pragma once

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/cuda/batched.hpp"
#include "ops/sparse_attention/cuda/loss_plan.hpp"

namespace talea::sparse_attention::cuda {

class LossRun {
 public:
  LossRun(const Call& call, const LossPlan& plan);
  void run();

 private:
  // A chunk of queries: as rows of the attention's heads and of the indexer's.
  struct Part {
    Chunk attention, index;
    int64_t columns = 0;  // of Kp: none behind them is a key of a query of the chunk
  };
  void begin();
  void end();
  int64_t columns_of(int64_t last) const;
  void gather(const Chunk& chunk, const int64_t* rows);
  void begin_entry(int64_t b);
  void one_part(const Part& part);
  // to [n, heads, Kp] = rows [n, heads, dim] keys^T.
  void compare(const Part& part, const Chunk& chunk, const void* keys, DType type, int64_t dim,
               const void* rows, int64_t stride, float* to);
  void teach_part(const Part& part);
  void form_dz(const Part& part, Factor factor, const View& dw);
  void form_dq(const Part& part);
  void form_dk(const Part& part);
  void add_dk(const Part& part);

  const Call& c_;
  const Problem& p_;
  const Args& a_;
  const LossPlan& plan_;
  Arena arena_;
  const LossBuffers b_;
  LossTables t_;
  View dk_sums_;  // fp32: the caller's dindex_k or the workspace's
  cudaStream_t stream_;
};

}  // namespace talea::sparse_attention::cuda
