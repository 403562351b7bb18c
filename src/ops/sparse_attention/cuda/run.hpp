// What: the passes of lane cuda over chunks of queries.
// Why: one class holds what a call's chunks share: tables, plan, buffers, stream.
// Never: allocates; synchronises only under IndexCheck::checked.
#pragma once

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/cuda/batched.hpp"
#include "ops/sparse_attention/cuda/plan.hpp"

namespace talea::sparse_attention::cuda {

class Run {
 public:
  Run(const Call& call, const ChunkPlan& plan);
  void forward();
  void backward();
  void select();

 private:
  template <typename F>
  void each_chunk(F&& body);
  void prepare(const Chunk& chunk);
  void multiply(const Batched& product);
  // to [n, H, Kp] = rows [n, H, columns] times the keys' first columns + beta to.
  void compare(const Chunk& chunk, const void* rows, int64_t columns, float* to, float beta = 0);
  // values [n, H, columns] = alpha weights [n, H, Kp] keys + beta values.
  void weigh(const Chunk& chunk, const void* weights, int64_t columns, float alpha, float beta);
  void forward_chunk(const Chunk& chunk);
  void backward_chunk(const Chunk& chunk);
  void form_dq(const Chunk& chunk);
  void form_dkv(const Chunk& chunk);
  void begin_dkv();
  void end_dkv();
  void select_chunk(const Chunk& chunk);
  void finish();

  const Call& c_;
  const Problem& p_;
  const Args& a_;
  const ChunkPlan& plan_;
  Arena arena_;
  const Buffers b_;
  const Tables tables_;
  cudaStream_t stream_;
  View dkv_sums_;  // fp32: the caller's dkv or the workspace's
};

}  // namespace talea::sparse_attention::cuda
