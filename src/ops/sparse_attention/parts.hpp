// What: the parts of a description that passes share: queries, keys, sequences, ranks.
// Why: attention and its index loss take q and kv in the same shapes and storages.
// Never: dereferences a tensor.
#pragma once

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/shapes.hpp"

namespace talea::sparse_attention {

// Views, devices and overlap of a call's tensors; `leader` fixes the device. Returns them all.
std::vector<NamedTensor> check_memory(const NamedTensor& leader, std::vector<NamedTensor> inputs,
                                      const std::vector<NamedTensor>& outputs);

void check_options(const Options& o);
void check_threads(int threads, int64_t workspace_limit_bytes);
void set_ranks(Problem& p, const Ranks& ranks);
// gather_kv where one rank has no others to gather from: it must hold all rows.
void check_whole_keys(const Problem& p, const Ranks& ranks);
// Spaces, pages, sequences and bounds that cannot go together.
void check_spaces(const Problem& p, const Inputs& in);

struct QueryTensors {
  const Tensor &q, &q_scale;
};
// batch, queries, heads, dim; q's dtype against its scale.
void fit_query(CheckedCall& r, const QueryTensors& t, const Ranks& ranks);

struct KeyTensors {
  const Tensor &kv, &kv_scale;
  int q_rank = 0;
  bool block_table = false;
};
// keys, groups, pages; storage, dtype and scale of kv. p.dim and p.blocks are known.
void fit_keys(CheckedCall& r, const KeyTensors& t, const Ranks& ranks);

// Sets p.sequences.
void fit_sequences(CheckedCall& r, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k);

}  // namespace talea::sparse_attention
