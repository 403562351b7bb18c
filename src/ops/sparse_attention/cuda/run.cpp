// What: the passes of lane cuda over chunks of queries.
// Why: gathered rows make every product a library's; own kernels hold the rules of a row.
// Never: allocates; synchronises only under IndexCheck::checked.
#include "ops/sparse_attention/cuda/run.hpp"

#include <algorithm>

#include "ops/sparse_attention/foreign.hpp"
#include "ops/sparse_attention/select_rows.hpp"

namespace talea::sparse_attention::cuda {

Run::Run(const Call& call, const ChunkPlan& plan)
    : c_(call),
      p_(call.problem),
      a_(call.args),
      plan_(plan),
      arena_(call.workspace),
      b_(lay_out(arena_, call.problem, plan_)),
      tables_(tables_of(call.problem, call.args)),
      stream_(device::cuda_stream(call.stream)) {}

template <typename F>
void Run::each_chunk(F&& body) {
  for (int64_t b = 0; b < p_.batch; ++b)
    for (int64_t s = 0; s < p_.queries; s += plan_.queries)
      for (int64_t g = 0; g < p_.groups; ++g) {
        const HeadRange heads = heads_of(p_, g);
        Chunk chunk;
        chunk.b = b;
        chunk.s = s;
        chunk.n = std::min(plan_.queries, p_.queries - s);
        chunk.g = g;
        chunk.head = heads.first;
        chunk.heads = heads.last - heads.first;
        chunk.padded = plan_.padded;
        body(chunk);
      }
}

void Run::multiply(const Batched& x) { cuda::multiply(x, plan_.operands, b_.product, stream_); }

// Rows, keys [n, Kp, D], q [n, H, D], S [n, H, Kp] = q keys^T.
void Run::prepare(const Chunk& chunk) {
  find_rows(tables_, chunk, inner_rows(p_), b_.rows, b_.counters, stream_);
  Gather gather;
  gather.kv = a_.kv;
  gather.scale = a_.kv_scale;
  gather.storage = p_.options.kv_storage;
  gather.scale_rank = p_.kv_scale_rank;
  gather.inner_rows = std::max<int64_t>(inner_rows(p_), 1);
  gather.dim = p_.dim;
  gather.to = plan_.operands;
  gather_rows(gather, chunk, b_.rows, b_.keys, stream_);
  pack(a_.q, a_.q_scale, chunk, p_.dim, plan_.operands, {b_.q}, stream_);
  compare(chunk, b_.q, p_.dim, b_.scores);
}

void Run::compare(const Chunk& chunk, const void* rows, int64_t columns, float* to, float beta) {
  Batched x;
  x.transpose_a = true;
  x.m = plan_.padded;
  x.n = chunk.heads;
  x.k = columns;
  x.lda = p_.dim;
  x.ldb = columns;
  x.ldc = plan_.padded;
  x.stride_a = plan_.padded * p_.dim;
  x.stride_b = chunk.heads * columns;
  x.stride_c = chunk.heads * plan_.padded;
  x.batches = chunk.n;
  x.beta = beta;
  x.c = to;
  x.a = b_.keys;
  x.b = rows;
  multiply_apart(x, plan_.operands, b_.product, stream_);
}

void Run::weigh(const Chunk& chunk, const void* weights, int64_t columns, float alpha, float beta) {
  Batched x;
  x.m = columns;
  x.n = chunk.heads;
  x.k = plan_.padded;
  x.lda = p_.dim;
  x.ldb = plan_.padded;
  x.ldc = columns;
  x.stride_a = plan_.padded * p_.dim;
  x.stride_b = chunk.heads * plan_.padded;
  x.stride_c = chunk.heads * columns;
  x.batches = chunk.n;
  x.alpha = alpha;
  x.beta = beta;
  x.a = b_.keys;
  x.b = weights;
  x.c = b_.values;
  multiply(x);
}

void Run::forward_chunk(const Chunk& chunk) {
  prepare(chunk);
  Softmax row;
  row.scale = static_cast<float>(p_.scale);
  row.sink = a_.sink;
  row.lse = a_.lse;
  row.row_max = a_.row_max;
  row.to = plan_.operands;
  softmax(row, chunk, b_.rows, b_.scores, b_.weights, b_.weights_lo, stream_);
  if (!a_.o && !a_.o_residual) return;
  weigh(chunk, b_.weights, p_.value_dim, 1, 0);
  if (b_.weights_lo) weigh(chunk, b_.weights_lo, p_.value_dim, 1, 1);
  write_output(b_.values, chunk, p_.value_dim, a_.o, a_.o_residual, stream_);
}

void Run::forward() {
  begin_counting(c_, tables_, b_.counters, stream_);
  each_chunk([&](const Chunk& chunk) { forward_chunk(chunk); });
  finish();
}

void Run::begin_dkv() {
  if (p_.wants_d_sink)
    device::check(cudaMemsetAsync(b_.d_sink, 0, static_cast<size_t>(p_.heads) * 8, stream_),
                  "d_sink: clearing");
  if (!p_.wants_dkv) return;
  dkv_sums_ = a_.dkv;
  const int64_t extent[4] = {outer_rows(p_), inner_rows(p_), p_.groups, p_.dim};
  if (plan_.converts_dkv) {
    dkv_sums_.data = b_.dkv;
    dkv_sums_.dtype = DType::f32;
    dkv_sums_.stride[3] = 1;
    for (int i = 2; i >= 0; --i) dkv_sums_.stride[i] = dkv_sums_.stride[i + 1] * extent[i + 1];
  }
  if (plan_.converts_dkv || !a_.accumulate_dkv) fill_zero(dkv_sums_, extent, stream_);
}

void Run::end_dkv() {
  const int64_t extent[4] = {outer_rows(p_), inner_rows(p_), p_.groups, p_.dim};
  if (p_.wants_dkv && plan_.converts_dkv) convert(dkv_sums_, a_.dkv, extent, stream_);
  if (p_.wants_d_sink) write_d_sink(b_.d_sink, p_.heads, a_.d_sink, stream_);
}

// dq [n, H, D] = scale dS keys
void Run::form_dq(const Chunk& chunk) {
  const auto scale = static_cast<float>(p_.scale);
  weigh(chunk, b_.slopes, p_.dim, scale, 0);
  if (b_.slopes_lo) weigh(chunk, b_.slopes_lo, p_.dim, scale, 1);
  write_output(b_.values, chunk, p_.dim, a_.dq, {}, stream_);
}

// contributions [n, Kp, D] = scale dS^T q, and in columns [0, dv) + P^T d_o
void Run::form_dkv(const Chunk& chunk) {
  Batched x;
  x.transpose_b = true;
  x.m = p_.dim;
  x.n = plan_.padded;
  x.k = chunk.heads;
  x.lda = p_.dim;
  x.ldb = plan_.padded;
  x.ldc = p_.dim;
  x.stride_a = chunk.heads * p_.dim;
  x.stride_b = chunk.heads * plan_.padded;
  x.stride_c = plan_.padded * p_.dim;
  x.batches = chunk.n;
  x.alpha = static_cast<float>(p_.scale);
  x.a = b_.q;
  x.c = b_.contributions;
  for (const void* slopes : {b_.slopes, b_.slopes_lo}) {
    if (!slopes) continue;
    x.b = slopes;
    multiply(x);
    x.beta = 1;
  }
  x.m = x.lda = p_.value_dim;
  x.stride_a = chunk.heads * p_.value_dim;
  x.alpha = 1;
  for (const void* d_o : {b_.d_o, b_.d_o_lo}) {
    if (!d_o) continue;
    x.a = d_o;
    for (const void* weights : {b_.weights, b_.weights_lo}) {
      if (!weights) continue;
      x.b = weights;
      multiply(x);
    }
  }
  Scatter to;
  to.sums = dkv_sums_;
  to.inner_rows = std::max<int64_t>(inner_rows(p_), 1);
  to.dim = p_.dim;
  to.all_rows = outer_rows(p_) * inner_rows(p_);
  to.atomic = p_.options.dkv_sum == DkvSum::atomic;
  scatter(to, chunk, b_.rows, b_.contributions, b_.sort, stream_);
}

void Run::backward_chunk(const Chunk& chunk) {
  if (chunk.heads == 0) return;
  prepare(chunk);
  View none;
  if (a_.d_o) {
    pack(a_.d_o, none, chunk, p_.value_dim, plan_.operands, {b_.d_o, b_.d_o_lo}, stream_);
  } else {
    for (void* d_o : {b_.d_o, b_.d_o_lo})
      if (d_o)
        device::check(cudaMemsetAsync(d_o, 0,
                                      static_cast<size_t>(chunk.n * chunk.heads * p_.value_dim *
                                                          size_of(plan_.operands)),
                                      stream_),
                      "d_o: clearing");
  }
  compare(chunk, b_.d_o, p_.value_dim, b_.d_weights);
  if (b_.d_o_lo) compare(chunk, b_.d_o_lo, p_.value_dim, b_.d_weights, 1);
  Slopes row;
  row.scale = static_cast<float>(p_.scale);
  row.sink = a_.sink;
  row.d_lse = a_.d_lse;
  row.lse = a_.saved_lse;
  row.d_o = a_.d_o;
  row.o = a_.saved_o;
  row.residual = a_.saved_o_residual;
  row.value_dim = p_.value_dim;
  row.to = plan_.operands;
  const SlopesOut out = {b_.weights, b_.weights_lo, b_.slopes, b_.slopes_lo, b_.d_sink_shares};
  slopes(row, chunk, b_.rows, b_.scores, b_.d_weights, out, stream_);
  if (p_.wants_d_sink) add_d_sink(b_.d_sink_shares, chunk, b_.d_sink, stream_);
  if (a_.dq) form_dq(chunk);
  if (p_.wants_dkv) form_dkv(chunk);
}

void Run::backward() {
  begin_counting(c_, tables_, b_.counters, stream_);
  begin_dkv();
  each_chunk([&](const Chunk& chunk) { backward_chunk(chunk); });
  end_dkv();
  finish();
}

void Run::select_chunk(const Chunk& chunk) {
  pack(a_.index_q, {}, chunk, p_.index_dim, plan_.operands, {b_.index_q}, stream_);
  Scores scores;
  scores.tables.base = tables_;
  scores.tables.causal = p_.options.causal;
  scores.tables.key_stride = p_.key_stride;
  scores.tables.begin = a_.begin;
  scores.tables.end = a_.end;
  scores.tables.weights = a_.index_weights;
  scores.tables.q_scale = a_.index_q_scale;
  scores.tables.k_scale = a_.index_k_scale;
  scores.relu = p_.act == Activation::relu;
  scores.keys = p_.keys_stored;
  for (int64_t key = 0; key < p_.keys_stored; key += plan_.key_columns) {
    scores.first_key = key;
    scores.columns = std::min(plan_.key_columns, p_.keys_stored - key);
    Batched x;  // z [n Hi, columns] = index_q index_k^T
    x.transpose_a = true;
    x.m = scores.columns;
    x.n = chunk.n * chunk.heads;
    x.k = p_.index_dim;
    x.lda = x.ldb = p_.index_dim;
    x.ldc = scores.columns;
    x.a = static_cast<const char*>(b_.index_k) + key * p_.index_dim * size_of(plan_.operands);
    x.b = b_.index_q;
    x.c = b_.products;
    multiply(x);
    combine(scores, chunk, b_.products, b_.index_scores, stream_);
  }
  Selected to;
  to.tables = scores.tables;
  to.b = chunk.b;
  to.s = chunk.s;
  to.n = chunk.n;
  to.stride = p_.keys_stored;
  to.top_k = p_.slots;
  to.indices = a_.selected;
  to.length = a_.selected_length;
  to.scores = a_.selected_scores;
  select_top(to, b_.index_scores, b_.counters, stream_);
}

void Run::select() {
  reset(b_.counters, stream_);
  for (int64_t b = 0; b < p_.batch; ++b) {
    Chunk all;  // index_k [keys, di] as operands
    all.b = b;
    all.n = p_.keys_stored;
    all.heads = 1;
    pack(a_.index_k, {}, all, p_.index_dim, plan_.operands, {b_.index_k}, stream_);
    for (int64_t s = 0; s < p_.queries; s += plan_.queries) {
      Chunk chunk;
      chunk.b = b;
      chunk.s = s;
      chunk.n = std::min(plan_.queries, p_.queries - s);
      chunk.heads = p_.index_heads;
      select_chunk(chunk);
    }
  }
  finish();
}

void Run::finish() {
  if (a_.status) write_status(b_.counters, tables_, a_.status, stream_);
}

}  // namespace talea::sparse_attention::cuda
