// What: derives the problem of a forward or backward call and checks all that needs no data.
// Why: errors come early, before any work, and name argument and value.
// Never: dereferences a tensor.
#include <algorithm>
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

void check_presence(Pass pass, const Inputs& in, const Outputs& out) {
  require(in.indices.present, bad, "indices: needed, with shape [batch, queries, groups, slots]");
  if (pass == Pass::forward) {
    for (const auto& [name, t] : {NamedTensor{"dq", &out.dq}, NamedTensor{"dkv", &out.dkv},
                                  NamedTensor{"d_sink", &out.d_sink}})
      require(!t->present, usage, "{}: an output of the backward pass", name);
    require(!out.o_residual || (out.o && is_16bit(out.o.dtype)), bad,
            "o_residual: needs o in 16 bits beside it");
    return;
  }
  for (const auto& [name, t] :
       {NamedTensor{"o", &out.o}, NamedTensor{"o_residual", &out.o_residual},
        NamedTensor{"lse", &out.lse}, NamedTensor{"row_max", &out.row_max}})
    require(!t->present, usage, "{}: an output of the forward pass", name);
  require(in.d_o || in.d_lse, usage, "d_o: backward needs d_o, d_lse or both");
  require(in.o.present == in.lse.present, usage, "o and lse: give both or neither");
  require(!in.o_residual || in.o, usage, "o_residual: needs o beside it");
  require(in.sink || !out.d_sink, usage, "d_sink: needs a sink");
}

void check_dtypes(const Problem& p, const Inputs& in, const Outputs& out) {
  const DType wide = in.q.dtype == f64 ? f64 : f32;
  const DType own = in.q.dtype == f8_e4m3 ? bf16 : in.q.dtype;
  const DType kv_own = is_16bit(in.kv.dtype) || in.kv.dtype == f64 ? in.kv.dtype : own;
  check_dtype("indices", in.indices, {i32, i64});
  for (const auto& [name, t] :
       {NamedTensor{"topk_length", &in.topk_length}, NamedTensor{"cu_seqlens_q", &in.cu_seqlens_q},
        NamedTensor{"cu_seqlens_k", &in.cu_seqlens_k}, NamedTensor{"q_positions", &in.q_positions},
        NamedTensor{"block_table", &in.block_table}, NamedTensor{"kv_lengths", &in.kv_lengths}})
    check_dtype(name, *t, {i32});
  check_dtype("sink", in.sink, {f32, wide});
  check_dtype("d_o", in.d_o, {own, f32, wide});
  check_dtype("o", in.o, {own, f32, wide});
  check_dtype("o_residual", in.o_residual, {own, f32, wide});
  check_dtype("d_lse", in.d_lse, {f32, wide});
  check_dtype("lse", in.lse, {f32, wide});
  check_dtype("o", out.o, {own, f32, wide});
  if (out.o_residual) check_dtype("o_residual", out.o_residual, {out.o.dtype});
  check_dtype("lse", out.lse, {f32, wide});
  check_dtype("row_max", out.row_max, {f32, wide});
  check_dtype("status", out.status, {i64});
  check_dtype("dq", out.dq, {own, f32, wide});
  check_dtype("dkv", out.dkv, {kv_own, f32, wide});
  check_dtype("d_sink", out.d_sink, {f32, wide});
  require(!out.accumulate_dkv || out.dkv, bad, "accumulate_dkv: set without dkv to add into");
  require(!out.accumulate_dkv || !is_16bit(out.dkv.dtype), bad,
          "dkv: accumulation needs an fp32 buffer, not {}", name_of(out.dkv.dtype));
  require(p.pass == Pass::forward || p.options.kv_storage != KvStorage::fp8_656,
          ErrorKind::unavailable,
          "kv_storage = fp8_656: forward only; packed rows have no gradient");
}

void fit_side(CheckedCall& r, const Inputs& in) {
  const Problem& p = r.problem;
  Args& a = r.args;
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries}, h = {"H", p.heads};
  a.indices = fit("indices", in.indices, {b, s, {"G", p.groups, true}, {"K", p.slots}});
  if (in.topk_length)
    a.topk_length = in.q.rank == 4 && in.topk_length.rank == 1
                        ? fit("topk_length", in.topk_length, {{"B", p.batch}})
                        : fit("topk_length", in.topk_length, {b, s});
  a.sink = fit("sink", in.sink, {h});
  fit_sequences(r, in.cu_seqlens_q, in.cu_seqlens_k);
  a.q_positions = fit("q_positions", in.q_positions, {b, s});
  a.block_table = fit("block_table", in.block_table, {b, {"blocks", p.blocks}});
  a.kv_lengths = fit("kv_lengths", in.kv_lengths, {{"B", p.batch}});
}

void fit_outputs(CheckedCall& r, const Inputs& in, const Outputs& out) {
  const Problem& p = r.problem;
  Args& a = r.args;
  const Dim b = {"B", p.batch, true}, s = {"S", p.queries}, h = {"H", p.heads};
  const Dim v = {"d_v", p.value_dim}, d = {"D", p.dim};
  a.d_o = fit("d_o", in.d_o, {b, s, h, v});
  a.d_lse = fit("d_lse", in.d_lse, {b, s, h});
  a.saved_o = fit("o", in.o, {b, s, h, v});
  a.saved_o_residual = fit("o_residual", in.o_residual, {b, s, h, v});
  a.saved_lse = fit("lse", in.lse, {b, s, h});
  a.o = fit("o", out.o, {b, s, h, v});
  a.o_residual = fit("o_residual", out.o_residual, {b, s, h, v});
  a.lse = fit("lse", out.lse, {b, s, h});
  a.row_max = fit("row_max", out.row_max, {b, s, h});
  a.status = fit("status", out.status, {{"4", 4}});
  a.dq = fit("dq", out.dq, {b, s, h, d});
  if (out.dkv && is_paged(p) && out.dkv.rank == 2) {
    a.dkv = fit("dkv", out.dkv, {{"rows", p.page_rows}, d});
    a.dkv.stride[3] = a.dkv.stride[1], a.dkv.stride[1] = a.dkv.stride[0], a.dkv.stride[0] = 0;
  } else if (is_paged(p)) {
    a.dkv = fit("dkv", out.dkv,
                {{"pages", p.pages}, {"page_rows", p.page_rows}, {"G", p.groups, true}, d});
  } else {
    a.dkv = fit("dkv", out.dkv, {b, {"S_kv", p.keys_stored}, {"G", p.groups, true}, d});
  }
  a.d_sink = fit("d_sink", out.d_sink, {h});
  a.accumulate_dkv = out.accumulate_dkv;
  for (const auto& [name, t] :
       {NamedTensor{"d_o", &in.d_o}, NamedTensor{"o", &in.o}, NamedTensor{"o", &out.o},
        NamedTensor{"o_residual", &in.o_residual}, NamedTensor{"o_residual", &out.o_residual},
        NamedTensor{"dq", &out.dq}, NamedTensor{"dkv", &out.dkv}})
    check_rows(name, *t);
}

void fill_flags(CheckedCall& r) {
  Problem& p = r.problem;
  const Args& a = r.args;
  p.index_dtype = a.indices.dtype;
  p.has_q_scale = a.q_scale.present;
  p.has_topk_length = a.topk_length.present;
  p.has_sink = a.sink.present;
  p.has_positions = a.q_positions.present;
  if (mutant(Mutant::sa11_plan_reads_data) && p.device == DeviceKind::cpu &&
      p.queries * p.slots > 0)
    p.has_positions = a.indices.integer(0) != -1;
  p.has_d_o = a.d_o.present;
  p.has_d_lse = a.d_lse.present;
  p.has_saved = a.saved_o.present;
  p.has_o_residual = a.saved_o_residual.present;
  p.wants_o = a.o.present;
  p.wants_o_residual = a.o_residual.present;
  p.wants_lse = a.lse.present;
  p.wants_row_max = a.row_max.present;
  p.wants_status = a.status.present;
  p.wants_dq = a.dq.present;
  p.wants_dkv = a.dkv.present;
  p.wants_d_sink = a.d_sink.present;
  p.accumulate_dkv = a.accumulate_dkv;
  const View& o = a.o ? a.o : a.saved_o;
  if (o) p.o_dtype = o.dtype, p.o_stride = strides_of(o);
  if (a.d_o) p.d_o_dtype = a.d_o.dtype, p.d_o_stride = strides_of(a.d_o);
  if (a.dq) p.dq_dtype = a.dq.dtype, p.dq_stride = strides_of(a.dq);
  if (a.dkv) p.dkv_dtype = a.dkv.dtype, p.dkv_stride = strides_of(a.dkv);
  uint64_t bits = 256;
  for (const View* v : {&a.q, &a.kv, &a.o, &a.saved_o, &a.d_o, &a.dq, &a.dkv})
    if (*v) bits |= reinterpret_cast<uintptr_t>(v->data);
  p.alignment_bytes = int64_t{1} << std::countr_zero(bits);
}

}  // namespace

CheckedCall checked(Pass pass, const Inputs& in, const Outputs& out, const Options& o,
                    const Ranks& ranks) {
  require(pass == Pass::forward || pass == Pass::backward, usage,
          "pass = {}: forward or backward; select and index_loss have structs of their own",
          static_cast<int>(pass));
  check_options(o);
  CheckedCall r;
  r.memory =
      check_memory({"q", &in.q}, tensors_of(in, input_fields), tensors_of(out, output_fields));
  r.replicated = {
      {"indices", &in.indices}, {"topk_length", &in.topk_length}, {"q_positions", &in.q_positions}};
  check_presence(pass, in, out);
  Problem& p = r.problem;
  p.pass = pass;
  p.options = o;
  set_ranks(p, ranks);
  fit_query(r, {in.q, in.q_scale}, ranks);
  p.value_dim = o.value_dim;
  require(p.value_dim >= 1, usage, "value_dim = {}: needed: how many columns of a row are value",
          p.value_dim);
  require(p.value_dim <= p.dim, bad, "value_dim = {}: a row has {} columns", p.value_dim, p.dim);
  p.options.scale = p.scale = o.scale == 0 ? 1 / std::sqrt(static_cast<double>(p.dim)) : o.scale;
  p.slots = in.indices.rank > 0 ? in.indices.shape[in.indices.rank - 1] : 0;
  p.blocks =
      in.block_table && in.block_table.rank > 0 ? in.block_table.shape[in.block_table.rank - 1] : 0;
  p.has_block_table = in.block_table.present;
  check_spaces(p, in);
  fit_keys(r, {in.kv, in.kv_scale, in.q.rank, in.block_table.present}, ranks);
  check_dtypes(p, in, out);
  fit_side(r, in);
  fit_outputs(r, in, out);
  fill_flags(r);
  return r;
}

Problem describe(Pass pass, const Inputs& inputs, const Outputs& outputs, const Options& options,
                 const Ranks& ranks) {
  return checked(pass, inputs, outputs, options, ranks).problem;
}

}  // namespace talea::sparse_attention
