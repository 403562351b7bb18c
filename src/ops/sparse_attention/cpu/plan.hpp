// What: tiles, chunks and buffers of lane cpu, as a pure function of problem and threads.
// Why: the workspace formula is this layout run without memory.
// Never: depends on data.
#pragma once

#include "core/arena.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention::cpu {

// Numbers of one thread: what fits its second cache.
struct ThreadBuffers {
  float* q = nullptr;       // panels of the query's heads [dim, heads]
  float* d_o = nullptr;     // backward: panels [value_dim, heads]
  float* rows = nullptr;    // widened rows of a tile, or of the heads; none where they lie in fp32
  float* scores = nullptr;  // [tile, padded heads]
  float* d_scores = nullptr;  // backward, the same
  float* o = nullptr;         // [heads, value_dim]
  float* dq = nullptr;        // backward, where dq is narrower: [heads, dim]
  float* heads = nullptr;     // per-head numbers: max, sum, factor, ...
  const float** pointers = nullptr;
  float** targets = nullptr;
};
inline constexpr int64_t head_numbers = 8;

struct Plan {
  int threads = 1;
  int64_t tile = 64;              // keys
  int64_t heads = 0, padded = 0;  // of a group: the most of any, and whole vectors of them
  int64_t chunk = 1;              // backward: queries between two sums into dkv
  bool in_place = false;          // rows of kv are read where they lie
  bool dkv_in_workspace = false;
  bool repeats_forward = false;
  int64_t entries = 1;           // of batch, whose dkv is in the workspace at once
  int64_t inner = 0, outer = 0;  // rows of kv as stored
  int64_t bytes = 0;
};

// What the queries of a chunk leave behind for the sum into dkv.
struct Chunk {
  float* weights = nullptr;  // [query, group, slot, 2 heads]: scale * dS, then P
  int64_t* rows = nullptr;   // [query, group, slot]: row of kv, outer * inner + row within
  int64_t* count = nullptr;  // [query, group]
  double* sink = nullptr;    // [query, heads]
  int64_t* bins = nullptr;   // how often each range of rows is named
};
inline constexpr int64_t row_bins = 256;

struct Layout {
  ThreadBuffers* threads = nullptr;
  Chunk chunk;
  float* dkv = nullptr;  // [entries * inner, groups, dim]
  int64_t bytes = 0;
};

Plan make_plan(const Problem& p, const DeviceFacts& device);
// Cuts the workspace; counts where the arena has none.
Layout lay_out(const Problem& p, const Plan& plan, Arena& arena);

int64_t padded_heads(int64_t heads);

}  // namespace talea::sparse_attention::cpu
