// What: the row kernels of lane cuda, as host functions that queue them.
// Why: what happens between the library products is said once, with its shapes.
// Never: allocates, synchronises, or multiplies matrices.
//
// A chunk is n queries of one batch entry and one group of heads: rows of S, P are [n, heads, Kp],
// where Kp is the list's length rounded up to 8, so that every row of a product is aligned.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/sparse_attention/foreign.cuh"
#include "ops/sparse_attention/sums.cuh"

namespace talea::sparse_attention::cuda {

// Which queries, group and heads a chunk holds.
struct Chunk {
  int64_t b = 0, s = 0, n = 0, g = 0, head = 0, heads = 0;
  int64_t padded = 0;  // Kp
};

// rows [n, Kp]: outer * inner_rows + inner of each valid slot, -1 else. counters may be null.
void find_rows(const Tables& tables, const Chunk& chunk, int64_t inner_rows, int64_t* rows,
               Counters* counters, cudaStream_t stream);

// Selected rows as operands: keys [n, Kp, dim] in `to`; absent ones zero.
struct Gather {
  View kv, scale;
  KvStorage storage{};
  int64_t scale_rank = 0, inner_rows = 0, dim = 0;
  DType to = DType::bf16;
};
void gather_rows(const Gather& gather, const Chunk& chunk, const int64_t* rows, void* keys,
                 cudaStream_t stream);

// A matrix [n, heads, columns] of the caller, packed in `to`. scale: of e4m3, may be absent. rest:
// what rounding left, may be null.
struct Packed {
  void *values = nullptr, *rest = nullptr;
};
void pack(const View& from, const View& scale, const Chunk& chunk, int64_t columns, DType to,
          const Packed& packed, cudaStream_t stream);

struct Softmax {
  float scale = 1;
  View sink, lse, row_max;  // lse, row_max: outputs, may be absent
  DType to = DType::bf16;   // of P
};
// S [n, heads, Kp] fp32 -> P, the probabilities with the sink in the denominator; rest: what
// rounding them left, may be null.
void softmax(const Softmax& softmax, const Chunk& chunk, const int64_t* rows, const float* scores,
             void* weights, void* rest, cudaStream_t stream);

// o [n, heads, columns] fp32 -> the caller's o and its residual.
void write_output(const float* values, const Chunk& chunk, int64_t columns, const View& o,
                  const View& residual, cudaStream_t stream);

struct Slopes {
  float scale = 1;
  View sink, d_lse;
  View lse, d_o, o, residual;  // lse and o: of an earlier forward, may be absent
  int64_t value_dim = 0;
  DType to = DType::bf16;
};
// S, dP [n, heads, Kp] fp32 -> P and dS as operands (lo: what rounding left, may be null), and the
// chunk's share of d_sink [n, heads]. Delta = sum (o + residual) d_o, or without o sum P dP, in
// fp32.
struct SlopesOut {
  void *p_hi = nullptr, *p_lo = nullptr, *ds_hi = nullptr, *ds_lo = nullptr;
  float* d_sink = nullptr;
};
void slopes(const Slopes& slopes, const Chunk& chunk, const int64_t* rows, const float* scores,
            const float* d_weights, const SlopesOut& out, cudaStream_t stream);
// d_sink[head] += sum over the chunk's queries in their order, fp64.
void add_d_sink(const float* shares, const Chunk& chunk, double* sums, cudaStream_t stream);
void write_d_sink(const double* sums, int64_t heads, const View& d_sink, cudaStream_t stream);

// dkv. sums: fp32 rows of `dim` columns, element (row, g) at row_offset(...): a View of fp32.
struct Scatter {
  View sums;  // [outer, inner, group, column] fp32
  int64_t inner_rows = 0, dim = 0, all_rows = 0;
  bool atomic = false;
};
// Bytes that the sort of n * Kp slots wants beside its keys.
int64_t sort_bytes(int64_t slots, int64_t all_rows);
struct SortBuffers {
  uint64_t *keys = nullptr, *sorted_keys = nullptr;
  uint32_t *slots = nullptr, *sorted_slots = nullptr;
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};
// Adds contributions [n, Kp, dim] fp32 to the rows their slots name: per row in the order of slots.
void scatter(const Scatter& scatter, const Chunk& chunk, const int64_t* rows,
             const float* contributions, const SortBuffers& sort, cudaStream_t stream);

// The indexer. products [n, heads, columns] fp32 of keys [first_key, first_key + columns) -> their
// scores [n, keys] fp32: heads ascending; -Inf outside the bounds.
struct Scores {
  IndexTables tables;
  bool relu = true;
  int64_t first_key = 0, columns = 0, keys = 0;
};
void combine(const Scores& scores, const Chunk& chunk, const float* products, float* to,
             cudaStream_t stream);
// Beside the passes. Element (s, j) of mask becomes 0 where a valid slot names key j.
void mask_keys(const Tables& tables, const View& mask, int64_t batch, cudaStream_t stream);
// Where the rows of a tensor and of its packed twin begin: extents and strides of four outer
// dimensions, missing ones first.
struct PackedRows {
  int64_t shape[4] = {1, 1, 1, 1}, from[4] = {0, 0, 0, 0}, to[4] = {0, 0, 0, 0};
  int64_t column = 1;  // stride of the columns
};
void pack_rows(const View& kv, uint8_t* to, const PackedRows& rows, cudaStream_t stream);

}  // namespace talea::sparse_attention::cuda
