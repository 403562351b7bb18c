// What: how many queries a chunk of lane cuda holds, and where its pieces lie in the workspace.
// Why: the formula of the workspace is this layout run without memory; the limit decides the chunk.
// Never: reads a tensor.
#pragma once

#include "core/arena.hpp"
#include "core/device_facts.hpp"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {

struct ChunkPlan {
  int64_t queries = 0;      // of a chunk
  int64_t padded = 0;       // slots of a list, rounded up to 8
  int64_t heads = 0;        // of the largest group
  int64_t key_columns = 0;  // of a tile of index products
  DType operands = DType::bf16;
  bool converts_dkv = false;  // dkv is summed in fp32 in the workspace
};

// Attention: [queries, ..] of a chunk. Select: index products and scores of a chunk.
struct Buffers {
  Counters* counters = nullptr;
  void* product = nullptr;  // cuBLASLt's own
  // forward and backward
  int64_t* rows = nullptr;     // [queries, padded]
  void* keys = nullptr;        // [queries, padded, dim]
  void* q = nullptr;           // [queries, heads, dim]
  float* scores = nullptr;     // [queries, heads, padded]
  void* weights = nullptr;     // [queries, heads, padded] P
  void* weights_lo = nullptr;  // split: what rounding P left
  float* values = nullptr;     // [queries, heads, value_dim], or of dq [.., dim]
  // backward
  void* d_o = nullptr;                           // [queries, heads, value_dim]
  void* d_o_lo = nullptr;                        // of an fp32 d_o: what rounding left
  float* d_weights = nullptr;                    // [queries, heads, padded] dP
  void *slopes = nullptr, *slopes_lo = nullptr;  // as weights
  float* contributions = nullptr;                // [queries, padded, dim]
  float* d_sink_shares = nullptr;                // [queries, heads]
  double* d_sink = nullptr;                      // [all heads]
  float* dkv = nullptr;                          // [outer, inner, groups, dim]
  SortBuffers sort;                              // of queries * padded slots
  // select
  void* index_q = nullptr;        // [queries, index heads, index dim]
  void* index_k = nullptr;        // [keys, index dim]
  float* products = nullptr;      // [queries, index heads, key_columns]
  float* index_scores = nullptr;  // [queries, keys]
};

// Rows of dkv: of a page or batch entry, and of all.
int64_t inner_rows(const Problem& p);
int64_t outer_rows(const Problem& p);

Buffers lay_out(Arena& arena, const Problem& p, const ChunkPlan& plan);

// The most queries a chunk that the limit allows; at least one.
ChunkPlan plan_chunks(const Problem& p);
int64_t bytes_of(const Problem& p, const ChunkPlan& plan);

}  // namespace talea::sparse_attention::cuda
