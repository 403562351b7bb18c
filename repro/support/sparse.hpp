// What: sparse attention for reproducers: data, the fp64 truth, our call, and fields compared.
// Why: each reproducer states its broken pattern and nothing else.
// Never: holds a broken pattern; those stand in the reproducers themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "repro/support/repro.hpp"
#include "talea/sparse_attention.hpp"

namespace talea::repro {

namespace sa = sparse_attention;

// One sequence, one key group. Values are kept as floats that the dtype of the call holds exactly.
struct SparseData {
  int64_t queries = 0, keys = 0, heads = 0, dim = 0, value_dim = 0, slots = 0;
  std::vector<float> q, kv, d_o, d_lse, sink;  // d_lse, sink: empty where not used
  std::vector<int32_t> indices, topk_length;   // topk_length: empty where not used
  DType dtype = DType::f32;                    // of q, kv, o and d_o
  DType gradients = DType::f32;                // of dq and dkv
  bool residual = false;                       // o_residual made and given to backward
  sa::Options options;

  int64_t row() const { return dim; }
};

// Normal q, kv and d_o, rounded to `dtype`; ascending lists without duplicates, every slot valid.
SparseData make_sparse(int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t value_dim,
                       int64_t slots, uint64_t seed, DType dtype = DType::f32);

struct SparseAnswer {
  std::vector<double> o, lse, row_max, dq, dkv, d_sink;
  int64_t status[4] = {0, -1, 0, 0};
  sa::Result forward, backward;
};

// Forward and, with d_o, backward. "reference": the truth, in fp64 on the host; "auto": ours.
SparseAnswer attend(const SparseData& data, const std::string& lane);

// What a broken pattern starts from: plain fp32 loops over the given lists; `list_of(s)` says whose
// list query s takes. An index below 0 is skipped.
SparseAnswer plain_attention(const SparseData& data);

struct Selected {
  std::vector<int32_t> indices, length;
  std::vector<float> scores;
  sa::Result result;
};
// index_q [S, Hi, di], index_k [S_kv, di], weights [S, Hi], all fp32.
struct IndexData {
  int64_t queries = 0, keys = 0, heads = 0, dim = 0, slots = 0;
  std::vector<float> q, k, weights;
  std::vector<int32_t> end;  // empty: all keys
};
Selected select_keys(const IndexData& data, const std::string& lane);
// I[t, j], by plain loops.
float index_score(const IndexData& data, int64_t query, int64_t key);

}  // namespace talea::repro
