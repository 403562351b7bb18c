// What: derives the problems of selection and index loss and checks all that needs no data.
// Why: errors come early, before any work, and name argument and value.
// Never: dereferences a tensor.
#include <bit>
#include <cmath>

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/fields.hpp"
#include "ops/sparse_attention/parts.hpp"

namespace talea::sparse_attention {
namespace {

constexpr auto bad = ErrorKind::invalid_data;
constexpr auto usage = ErrorKind::usage;
using enum DType;

struct Indexer {
  const Tensor &q, &q_scale, &k, &k_scale, &weights, &begin, &end, &cu_q, &cu_k, &positions;
};

// index_q, index_k, index_weights with their scales, and what bounds the keys.
void fit_indexer(CheckedCall& r, const Indexer& t, const Ranks& ranks) {
  Problem& p = r.problem;
  Args& a = r.args;
  require(t.q && (t.q.rank == 3 || t.q.rank == 4), bad,
          "index_q: needed, with shape [batch, queries, index heads, columns]{}", but_given(t.q));
  const int f = t.q.rank - 3;
  p.batch = f ? t.q.shape[0] : 1;
  p.queries = t.q.shape[f];
  p.index_heads = t.q.shape[f + 1];
  p.index_dim = t.q.shape[f + 2];
  p.device = t.q.device;
  p.device_index = t.q.device_index;
  p.index_q_dtype = t.q.dtype;
  check_dtype("index_q", t.q, {f32, bf16, f16, f64, f8_e4m3});
  require(t.k && (t.k.rank == 2 || t.k.rank == 3), bad,
          "index_k: needed, with shape [batch, keys, columns]{}", but_given(t.k));
  require(t.k.dtype == t.q.dtype, bad, "index_k: dtype {} where index_q has {}", name_of(t.k.dtype),
          name_of(t.q.dtype));
  p.keys = p.keys_stored = t.k.shape[t.k.rank - 2];
  if (p.gather_kv) {
    require(ranks.total_kv_rows >= p.row_begin + p.keys_stored, usage,
            "total_kv_rows = {}: this rank alone holds rows [{}, {})", ranks.total_kv_rows,
            p.row_begin, p.row_begin + p.keys_stored);
    p.keys = ranks.total_kv_rows;
  }
  check_whole_keys(p, ranks);
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries}, h = {"Hi", p.index_heads};
  const Dim k = {"S_kv", p.keys_stored}, d = {"di", p.index_dim};
  a.index_q = fit("index_q", t.q, {b, s, h, d});
  a.index_k = fit("index_k", t.k, {b, k, {"1", 1, true}, d});
  check_rows("index_q", t.q);
  check_rows("index_k", t.k);
  require(t.weights.present, bad,
          "index_weights: needed, with shape [batch, queries, index heads]");
  check_dtype("index_weights", t.weights,
              {f32, bf16, t.q.dtype == f64 ? f64 : f32, t.q.dtype == f16 ? f16 : f32});
  p.index_weights_dtype = t.weights.dtype;
  a.index_weights = fit("index_weights", t.weights, {b, s, h});
  const bool scaled = t.q.dtype == f8_e4m3;
  require(t.q_scale.present == scaled, bad, "index_q_scale: {} beside index_q of dtype {}",
          scaled ? "needed" : "given", name_of(t.q.dtype));
  require(t.k_scale.present == scaled, bad, "index_k_scale: {} beside index_k of dtype {}",
          scaled ? "needed" : "given", name_of(t.k.dtype));
  check_dtype("index_q_scale", t.q_scale, {f32});
  check_dtype("index_k_scale", t.k_scale, {f32});
  a.index_q_scale = fit("index_q_scale", t.q_scale, {b, s, h});
  a.index_k_scale = fit("index_k_scale", t.k_scale, {b, k});
  for (const auto& [name, tensor] :
       {NamedTensor{"begin", &t.begin}, NamedTensor{"end", &t.end},
        NamedTensor{"cu_seqlens_q", &t.cu_q}, NamedTensor{"cu_seqlens_k", &t.cu_k},
        NamedTensor{"q_positions", &t.positions}})
    check_dtype(name, *tensor, {i32});
  require(t.cu_q.present == t.cu_k.present, usage,
          "cu_seqlens_q and cu_seqlens_k: give both or neither");
  a.begin = fit("begin", t.begin, {b, s});
  a.end = fit("end", t.end, {b, s});
  fit_sequences(r, t.cu_q, t.cu_k);
  a.q_positions = fit("q_positions", t.positions, {b, s});
  p.has_begin = t.begin.present;
  p.has_end = t.end.present;
  p.has_positions = t.positions.present;
}

void check_indexer(Activation act, int64_t key_stride, int64_t position_base) {
  require(act == Activation::relu || act == Activation::identity, usage,
          "act = {}: relu or identity", static_cast<int>(act));
  require(key_stride >= 1, usage, "key_stride = {}: must be >= 1", key_stride);
  require(position_base >= 0 && position_base <= INT32_MAX, usage,
          "q_position_base = {}: must lie in [0, 2^31)", position_base);
}

void check_loss(const IndexLossInputs& in, const IndexLossOutputs& out, const IndexLossOptions& o) {
  require(std::isfinite(o.coeff), usage, "coeff = {}: must be finite", o.coeff);
  require(o.denominator == LossDenominator::valid ||
              (std::isfinite(o.denominator_value) && o.denominator_value > 0),
          usage, "denominator = {}: a given denominator must be finite and > 0",
          o.denominator_value);
  require(o.denominator == LossDenominator::given || o.denominator_value == 0, usage,
          "denominator_value = {}: of denominator = given; it is valid", o.denominator_value);
  require(o.denominator_scope == LossScope::local || o.denominator == LossDenominator::valid, usage,
          "denominator_scope = global: a given denominator is already global");
  const bool sparse = o.keys == LossKeys::sparse;
  require(in.indices.present == sparse, usage, "indices: {} with keys = {}",
          sparse ? "needed" : "given", sparse ? "sparse" : "dense");
  require(sparse || !in.topk_length, usage, "topk_length: given with keys = dense");
  require(!sparse || (!in.begin && !in.end), usage,
          "begin, end: bounds are of keys = dense; the list of keys = sparse is its own");
  require(!sparse || o.key_stride == 1, usage, "key_stride = {}: of keys = dense only",
          o.key_stride);
  require(o.index_space != IndexSpace::slots, usage,
          "index_space = slots: positions and index keys are unknown there");
  check_dtype("loss", out.loss, {f32, f64});
  check_dtype("status", out.status, {i64});
  check_dtype("row_weight", in.row_weight, {f32});
  check_dtype("indices", in.indices, {i32, i64});
  check_dtype("topk_length", in.topk_length, {i32});
  check_dtype("lse", in.lse, {f32, f64});
  const DType own = in.index_q.dtype == f8_e4m3 ? f32 : in.index_q.dtype;
  check_dtype("dindex_q", out.dindex_q, {own, f32, f64});
  check_dtype("dindex_k", out.dindex_k, {own, f32, f64});
  check_dtype("dindex_weights", out.dindex_weights, {in.index_weights.dtype, f32, f64});
  require(!out.accumulate_dindex_k || out.dindex_k, bad,
          "accumulate_dindex_k: set without dindex_k to add into");
  require(!out.accumulate_dindex_k || !is_16bit(out.dindex_k.dtype), bad,
          "dindex_k: accumulation needs an fp32 buffer, not {}", name_of(out.dindex_k.dtype));
}

void fit_loss_outputs(CheckedCall& r, const IndexLossOutputs& out) {
  Problem& p = r.problem;
  Args& a = r.args;
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries}, h = {"Hi", p.index_heads};
  const Dim d = {"di", p.index_dim};
  a.loss = fit("loss", out.loss, {});
  a.dindex_q = fit("dindex_q", out.dindex_q, {b, s, h, d});
  a.dindex_k = fit("dindex_k", out.dindex_k, {b, {"S_kv", p.keys_stored}, {"1", 1, true}, d});
  a.dindex_weights = fit("dindex_weights", out.dindex_weights, {b, s, h});
  a.status = fit("status", out.status, {{"4", 4}});
  check_rows("dindex_q", out.dindex_q);
  check_rows("dindex_k", out.dindex_k);
  a.accumulate_dindex_k = out.accumulate_dindex_k;
  p.wants_loss = a.loss.present;
  p.wants_dindex_q = a.dindex_q.present;
  p.wants_dindex_k = a.dindex_k.present;
  p.wants_dindex_weights = a.dindex_weights.present;
  p.wants_status = a.status.present;
  if (a.dindex_q) p.dindex_q_dtype = a.dindex_q.dtype;
  if (a.dindex_k) p.dindex_k_dtype = a.dindex_k.dtype;
  if (a.dindex_weights) p.dindex_weights_dtype = a.dindex_weights.dtype;
}

}  // namespace

CheckedCall checked(const SelectInputs& in, const SelectOutputs& out, const SelectOptions& o,
                    const Ranks& ranks) {
  check_threads(o.threads, o.workspace_limit_bytes);
  check_indexer(o.act, o.key_stride, o.q_position_base);
  CheckedCall r;
  r.memory = check_memory({"index_q", &in.index_q}, tensors_of(in, select_input_fields),
                          tensors_of(out, select_output_fields));
  r.replicated = {{"q_positions", &in.q_positions}};
  Problem& p = r.problem;
  p.pass = Pass::select;
  p.options.causal = o.causal;
  p.options.q_position_base = o.q_position_base;
  p.options.workspace_limit_bytes = o.workspace_limit_bytes;
  p.options.threads = o.threads;
  p.options.lane = o.lane;
  p.act = o.act;
  p.key_stride = o.key_stride;
  set_ranks(p, ranks);
  fit_indexer(r,
              {in.index_q, in.index_q_scale, in.index_k, in.index_k_scale, in.index_weights,
               in.begin, in.end, in.cu_seqlens_q, in.cu_seqlens_k, in.q_positions},
              ranks);
  p.q_stride = strides_of(r.args.index_q);
  p.kv_stride = strides_of(r.args.index_k);
  uint64_t bits = 256;
  for (const View* v : {&r.args.index_q, &r.args.index_k})
    if (*v) bits |= reinterpret_cast<uintptr_t>(v->data);
  p.alignment_bytes = int64_t{1} << std::countr_zero(bits);
  require(o.top_k >= 0, usage, "top_k = {}: must be >= 0", o.top_k);
  p.slots = o.top_k;
  for (const Tensor* t : {&out.indices, &out.scores})
    if (p.slots == 0 && *t && t->rank > 0) p.slots = t->shape[t->rank - 1];
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries}, k = {"K", p.slots};
  check_dtype("indices", out.indices, {i32});
  check_dtype("topk_length", out.topk_length, {i32});
  check_dtype("scores", out.scores, {f32, p.index_q_dtype == f64 ? f64 : f32});
  check_dtype("status", out.status, {i64});
  r.args.selected = fit("indices", out.indices, {b, s, {"G", 1, true}, k});
  r.args.selected_length = fit("topk_length", out.topk_length, {b, s});
  r.args.selected_scores = fit("scores", out.scores, {b, s, {"G", 1, true}, k});
  r.args.status = fit("status", out.status, {{"4", 4}});
  require(p.keys <= INT32_MAX, bad, "index_k: {} keys do not fit into int32 indices", p.keys);
  p.wants_indices = out.indices.present;
  p.wants_topk_length = out.topk_length.present;
  p.wants_scores = out.scores.present;
  p.wants_status = out.status.present;
  return r;
}

CheckedCall checked(const IndexLossInputs& in, const IndexLossOutputs& out,
                    const IndexLossOptions& o, const Ranks& ranks) {
  Options shared;
  shared.scale = o.scale;
  shared.causal = o.causal;
  shared.q_position_base = o.q_position_base;
  shared.index_space = o.index_space;
  shared.index_check = o.index_check;
  shared.kv_storage = o.kv_storage;
  shared.dkv_sum = o.dindex_k_sum;
  shared.workspace_limit_bytes = o.workspace_limit_bytes;
  shared.threads = o.threads;
  shared.lane = o.lane;
  check_options(shared);
  check_indexer(o.act, o.key_stride, o.q_position_base);
  check_loss(in, out, o);
  CheckedCall r;
  r.memory = check_memory({"index_q", &in.index_q}, tensors_of(in, index_loss_input_fields),
                          tensors_of(out, index_loss_output_fields));
  r.replicated = {
      {"indices", &in.indices}, {"topk_length", &in.topk_length}, {"q_positions", &in.q_positions}};
  Problem& p = r.problem;
  p.pass = Pass::index_loss;
  p.options = shared;
  p.act = o.act;
  p.key_stride = o.key_stride;
  p.loss_keys = o.keys;
  p.coeff = o.coeff;
  p.denominator = o.denominator;
  p.denominator_value = o.denominator_value;
  p.denominator_scope = o.denominator_scope;
  set_ranks(p, ranks);
  fit_indexer(r,
              {in.index_q, in.index_q_scale, in.index_k, in.index_k_scale, in.index_weights,
               in.begin, in.end, in.cu_seqlens_q, in.cu_seqlens_k, in.q_positions},
              ranks);
  const int64_t batch = p.batch, queries = p.queries, keys = p.keys_stored;
  fit_query(r, {in.q, in.q_scale}, ranks);
  require(p.batch == batch && p.queries == queries, bad,
          "q: {} queries in {} batch entries where index_q has {} in {}", p.queries, p.batch,
          queries, batch);
  p.options.scale = p.scale = o.scale == 0 ? 1 / std::sqrt(static_cast<double>(p.dim)) : o.scale;
  p.value_dim = p.options.value_dim = o.kv_storage == KvStorage::fp8_656 ? packed_value_dim : p.dim;
  fit_keys(r, {in.kv, in.kv_scale, in.q.rank, false}, ranks);
  require(p.keys_stored == keys, bad, "kv: {} keys where index_k has {}", p.keys_stored, keys);
  require(p.groups == 1, bad, "kv: {} groups: the index loss takes one", p.groups);
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries};
  p.slots = in.indices && in.indices.rank > 0 ? in.indices.shape[in.indices.rank - 1] : 0;
  r.args.indices = fit("indices", in.indices, {b, s, {"G", 1, true}, {"K", p.slots}});
  if (in.indices) p.index_dtype = in.indices.dtype;
  if (in.topk_length)
    r.args.topk_length = in.q.rank == 4 && in.topk_length.rank == 1
                             ? fit("topk_length", in.topk_length, {{"B", p.batch}})
                             : fit("topk_length", in.topk_length, {b, s});
  r.args.saved_lse = fit("lse", in.lse, {b, s, {"H", p.heads}});
  r.args.row_weight = fit("row_weight", in.row_weight, {b, s});
  p.has_topk_length = in.topk_length.present;
  p.has_saved = in.lse.present;
  p.has_row_weight = in.row_weight.present;
  fit_loss_outputs(r, out);
  return r;
}

Problem describe(const SelectInputs& inputs, const SelectOutputs& outputs,
                 const SelectOptions& options, const Ranks& ranks) {
  return checked(inputs, outputs, options, ranks).problem;
}

Problem describe(const IndexLossInputs& inputs, const IndexLossOutputs& outputs,
                 const IndexLossOptions& options, const Ranks& ranks) {
  return checked(inputs, outputs, options, ranks).problem;
}

}  // namespace talea::sparse_attention
