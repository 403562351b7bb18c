// What: the tensors of a call with every extent in its place: [batch, row, head, column].
// Why: missing B and G, broadcast lengths and free strides are resolved once, not in each lane.
// Never: owns memory or knows what a tensor means.
#pragma once

#include "core/half.hpp"
#include "ops/sparse_attention/rule.hpp"

namespace talea::sparse_attention {

// Strides count elements; 0 where an extent is missing or one value serves all.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[4] = {0, 0, 0, 0};
  bool present = false;

  explicit operator bool() const { return present; }
  int64_t at(int64_t b, int64_t r = 0, int64_t h = 0, int64_t c = 0) const {
    const int64_t at = b * stride[0] + r * stride[1] + h * stride[2] + c * stride[3];
    return mutant(Mutant::sa30_offset_32_bit) ? static_cast<int32_t>(at) : at;
  }
  const char* address(int64_t element) const {
    return static_cast<const char*>(data) + element * size_of(dtype);
  }
  double get(int64_t b, int64_t r = 0, int64_t h = 0, int64_t c = 0) const {
    return load_element(data, dtype, at(b, r, h, c));
  }
  int64_t integer(int64_t b, int64_t r = 0, int64_t h = 0, int64_t c = 0) const {
    return load_index(data, dtype, at(b, r, h, c));
  }
  void put(double value, int64_t b, int64_t r = 0, int64_t h = 0, int64_t c = 0) const {
    store_element(data, dtype, at(b, r, h, c), value);
  }
};

struct Args {
  // Attention. kv and dkv: [batch or page, row, group, column]; of fp8_656 the columns are bytes.
  View q, q_scale, kv, kv_scale, indices, topk_length, sink;
  View cu_seqlens_q, cu_seqlens_k, q_positions, block_table, kv_lengths;
  View d_o, d_lse, saved_o, saved_o_residual, saved_lse;
  View o, o_residual, lse, row_max, status, dq, dkv, d_sink;
  bool accumulate_dkv = false;
  // The indexer. index_k: [batch, row, 0, column].
  View index_q, index_q_scale, index_k, index_k_scale, index_weights, begin, end, row_weight;
  View selected, selected_length, selected_scores;  // outputs of select
  View loss, dindex_q, dindex_k, dindex_weights;
  bool accumulate_dindex_k = false;
};

// kv lies in pages: of a block table, or counted through.
inline bool is_paged(const Problem& p) {
  return p.has_block_table || p.options.index_space == IndexSpace::slots;
}

KeyRule key_rule(const Problem& p);
// Of query s of batch entry b. Host tensors only.
QueryRule query_rule(const Problem& p, const Args& a, int64_t b, int64_t s);
// The row of a query's index list.
inline int64_t list_of(int64_t s) {
  return mutant(Mutant::sa3_list_of_the_neighbour) ? s - s % 2 : s;
}
// The keys [begin, end) of a query of the indexer, as stored rows of the batch entry.
struct Bounds {
  int64_t begin = 0, end = 0;
};
Bounds index_bounds(const Problem& p, const Args& a, int64_t b, int64_t s);

}  // namespace talea::sparse_attention
