// What: what a query brings to the rule of section 1, read from device tensors.
// Why: the rule itself is one function for host and device (rule.hpp); only the reading differs.
// Never: reads an index list or a key.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ops/sparse_attention/args.hpp"

namespace talea::sparse_attention::cuda {

// What of a problem the kernels that read index lists need; a plain value.
struct Tables {
  KeyRule rule;
  int64_t queries = 0, slots = 0, groups = 1, keys = 0, sequences = 0, position_base = 0;
  bool has_block_table = false;
  View indices, topk_length, cu_seqlens_q, cu_seqlens_k, q_positions, block_table, kv_lengths;
};

inline Tables tables_of(const Problem& p, const Args& a) {
  Tables t;
  t.rule = key_rule(p);
  t.queries = p.queries;
  t.slots = p.slots;
  t.groups = p.groups;
  t.keys = p.keys;
  t.sequences = p.sequences;
  t.position_base = p.options.q_position_base;
  t.has_block_table = p.has_block_table;
  t.indices = a.indices;
  t.topk_length = a.topk_length;
  t.cu_seqlens_q = a.cu_seqlens_q;
  t.cu_seqlens_k = a.cu_seqlens_k;
  t.q_positions = a.q_positions;
  t.block_table = a.block_table;
  t.kv_lengths = a.kv_lengths;
  return t;
}

// What the indexer's kernels need beside the tables.
struct IndexTables {
  Tables base;
  bool causal = false;
  int64_t key_stride = 1;
  View begin, end, weights, q_scale, k_scale;
};

#ifdef __CUDACC__

__device__ inline int64_t integer_at(const View& v, int64_t element) {
  return v.dtype == DType::i32 ? static_cast<const int32_t*>(v.data)[element]
                               : static_cast<const int64_t*>(v.data)[element];
}

__device__ inline int64_t offset(const View& v, int64_t b, int64_t r = 0, int64_t h = 0,
                                 int64_t c = 0) {
  return b * v.stride[0] + r * v.stride[1] + h * v.stride[2] + c * v.stride[3];
}

__device__ inline float e4m3(uint8_t bits) {
  __nv_fp8_e4m3 x;
  x.__x = bits;
  return static_cast<float>(x);
}

__device__ inline float number_at(const View& v, int64_t element) {
  switch (v.dtype) {
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(v.data)[element]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(v.data)[element]);
    case DType::f8_e4m3:
      return e4m3(static_cast<const uint8_t*>(v.data)[element]);
    case DType::f64:
      return static_cast<float>(static_cast<const double*>(v.data)[element]);
    default:
      return static_cast<const float*>(v.data)[element];
  }
}

__device__ inline void put(const View& v, int64_t element, float value) {
  switch (v.dtype) {
    case DType::bf16:
      static_cast<__nv_bfloat16*>(v.data)[element] = __float2bfloat16_rn(value);
      break;
    case DType::f16:
      static_cast<__half*>(v.data)[element] = __float2half_rn(value);
      break;
    case DType::f64:
      static_cast<double*>(v.data)[element] = value;
      break;
    default:
      static_cast<float*>(v.data)[element] = value;
  }
}

// A query's own sequence and its number within it; rows [0, 0) where it has none, or where
// cu_seqlens run backwards or beyond the rows: its slots are then absent.
struct Place {
  int64_t first = 0, last = 0, number = 0;
};

__device__ inline Place place_of(const Tables& t, int64_t s) {
  int64_t low = 0, high = t.sequences;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (integer_at(t.cu_seqlens_q, offset(t.cu_seqlens_q, middle)) <= s)
      low = middle + 1;
    else
      high = middle;
  }
  const int64_t i = low - 1;
  if (i < 0) return {};
  const int64_t begin = integer_at(t.cu_seqlens_q, offset(t.cu_seqlens_q, i));
  const int64_t end = integer_at(t.cu_seqlens_q, offset(t.cu_seqlens_q, i + 1));
  const int64_t first = integer_at(t.cu_seqlens_k, offset(t.cu_seqlens_k, i));
  const int64_t last = integer_at(t.cu_seqlens_k, offset(t.cu_seqlens_k, i + 1));
  if (s >= end || begin < 0 || first < 0 || last < first || last > t.keys) return {};
  return {first, last, s - begin};
}

__device__ inline QueryRule query_rule(const Tables& t, int64_t b, int64_t s) {
  QueryRule q;
  q.batch = b;
  q.slots = t.slots;
  if (t.topk_length.present) {
    const int64_t given = integer_at(t.topk_length, offset(t.topk_length, b, s));
    q.slots = given < 0 ? 0 : given > t.slots ? t.slots : given;
    if (mutant(Mutant::sa34_length_ignored) || (given < 0 && mutant(Mutant::sa5_length_not_cut)))
      q.slots = t.slots;
  }
  q.last = t.keys;
  int64_t number = s;
  if (t.sequences > 0) {
    const Place place = place_of(t, s);
    q.first = place.first;
    q.last = place.last;
    number = place.number;
  } else if (t.has_block_table) {
    const int64_t given = integer_at(t.kv_lengths, offset(t.kv_lengths, b));
    q.last = given < 0 ? 0 : given > t.keys ? t.keys : given;
    q.table = static_cast<const int32_t*>(t.block_table.data) + offset(t.block_table, b);
    q.table_stride = t.block_table.stride[1];
  }
  q.position = t.q_positions.present ? integer_at(t.q_positions, offset(t.q_positions, b, s))
                                     : t.position_base + number;
  return q;
}

__device__ inline int64_t floor_of(int64_t x, int64_t by) {
  return x >= 0 ? x / by : -((-x + by - 1) / by);
}

// The keys [begin, end) of a query of the indexer, as stored rows of the batch entry.
__device__ inline Bounds index_bounds(const IndexTables& t, int64_t b, int64_t s) {
  Bounds own = {0, t.base.keys};
  int64_t number = s;
  if (t.base.sequences > 0) {
    const Place place = place_of(t.base, s);
    own = {place.first, place.last};
    number = place.number;
  }
  Bounds cut = own;
  if (t.begin.present) {
    const int64_t given = integer_at(t.begin, offset(t.begin, b, s));
    cut.begin = given > cut.begin ? given : cut.begin;
  }
  if (t.end.present) {
    const int64_t given = integer_at(t.end, offset(t.end, b, s));
    cut.end = given < cut.end ? given : cut.end;
  }
  if (t.causal) {
    const View& positions = t.base.q_positions;
    const int64_t position = positions.present ? integer_at(positions, offset(positions, b, s))
                                               : t.base.position_base + number;
    const int64_t seen = own.begin + floor_of(position + 1, t.key_stride);
    cut.end = seen < cut.end ? seen : cut.end;
  }
  if (cut.begin > cut.end) return {own.begin, own.begin};
  return cut;
}

#endif

}  // namespace talea::sparse_attention::cuda
