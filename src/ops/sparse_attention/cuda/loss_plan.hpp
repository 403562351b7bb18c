// What: how many queries a chunk of lane cuda's index loss holds, and where its pieces lie.
// Why: the formula of the workspace is this layout run without memory; the limit decides the chunk.
// Never: reads a tensor, or lets the chunk change a result.
#pragma once

#include <optional>
#include <string>

#include "core/arena.hpp"
#include "ops/sparse_attention/cuda/loss.hpp"

namespace talea::sparse_attention::cuda {

struct LossPlan {
  int64_t queries = 0;  // of a chunk
  int64_t padded = 0;   // Kp: slots of a list or all keys, rounded up to 8
  bool dense = false;
  int copies = 1;  // operands of a number: two of bf16, which rounding takes digits from
  DType attention = DType::bf16, index = DType::bf16;  // operands
  bool converts_dk = false;                            // dindex_k is summed in the workspace
};

// Of a dense loss keys are there once for all queries of a batch entry: n is 1 in their shapes.
struct LossBuffers {
  Counters* counters = nullptr;
  void* product = nullptr;  // cuBLASLt's own
  LossSums* sums = nullptr;
  double* losses = nullptr;        // [n]
  int64_t* rows = nullptr;         // [n, Kp]
  void* keys = nullptr;            // [n, Kp, D]
  void* index_keys = nullptr;      // [n, Kp, di]
  void* q = nullptr;               // [n, H, D]
  void* index_q = nullptr;         // [n, copies, Hi, di]
  float* logits = nullptr;         // [n, H, Kp]
  HeadSum* head_sums = nullptr;    // [n, H]
  float* teacher = nullptr;        // [n, Kp]
  float* z = nullptr;              // [n, Hi, Kp]
  float* scores = nullptr;         // [n, Kp], then their gradients
  void* dz = nullptr;              // [n, copies, Hi, Kp]
  float* dq = nullptr;             // [n, copies, Hi, di]
  float* contributions = nullptr;  // [n, Kp, di], of lists
  float* dk = nullptr;             // [B, keys, di]
  SortBuffers sort;                // of n * Kp slots
};
LossBuffers lay_out(Arena& arena, const Problem& p, const LossPlan& plan);
int64_t bytes_of(const Problem& p, const LossPlan& plan);

std::optional<std::string> decline_loss(const Problem& p);
// The most queries a chunk that the limit allows; at least one.
LossPlan plan_loss(const Problem& p);

}  // namespace talea::sparse_attention::cuda
