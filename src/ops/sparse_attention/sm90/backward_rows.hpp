// What: what lane sm90's backward pass does beside its products, as host functions that queue it.
// Why: Delta, d_sink and the sum of contributions are rows of numbers, not tiles.
// Never: allocates, synchronises, or multiplies matrices.
#pragma once

#include "ops/sparse_attention/sm90/backward_tile.hpp"

namespace talea::sparse_attention::sm90 {

// delta [batch, queries, heads] = sum of (o + its residual) d_o, fp32. residual may be absent.
// sink_share, alike: what of a row's weight its sink takes, by its lse; may be null.
struct Delta {
  View d_o, o, residual, lse, sink;
  int64_t batch = 0, queries = 0, heads = 0, columns = 0;
  bool words = false;  // all of 16 bits on 16-byte words
};
void form_delta(const Delta& d, bool f16, float* delta, float* sink_share, cudaStream_t stream);

// d_sink[head], in fp64, queries in their order.
void form_d_sink(const Delta& d, const float* delta, const float* sink_share, const View& d_sink,
                 cudaStream_t stream);

// The slots of a chunk of lists, sorted by the row of dkv they name, in the order of (query, slot).
struct Sorted {
  uint32_t *keys = nullptr, *sorted_keys = nullptr;    // the row, of [outer, inner, group]
  uint32_t *slots = nullptr, *sorted_slots = nullptr;  // number within the chunk
  uint32_t* starts = nullptr;                          // [rows + 1]
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
};
int64_t sort_bytes(int64_t slots, int64_t rows);

// Where contributions are added: rows of dkv, fp32.
struct Segments {
  cuda::Tables tables;
  View sums;
  int64_t rows = 0, inner_rows = 1;                       // rows: outer * inner * groups
  int64_t first_list = 0, lists = 0, tiles = 1, dim = 0;  // tiles: of heads, each its own row
};
void sort_slots(const Segments& s, const Sorted& sorted, cudaStream_t stream);
void add_segments(const Segments& s, const Sorted& sorted, const float* contributions,
                  cudaStream_t stream);

}  // namespace talea::sparse_attention::sm90
