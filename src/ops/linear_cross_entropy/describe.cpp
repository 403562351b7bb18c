// What: derives the problem from the arguments and checks everything that needs no data.
// Why: errors come early, before any work, and name argument and value.
// Never: dereferences a tensor.
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/contract.hpp"
#include "ops/linear_cross_entropy/fields.hpp"
#include "ops/linear_cross_entropy/late.hpp"

namespace talea::lce {
namespace {

constexpr auto data_error = ErrorKind::invalid_data;
constexpr int most_threads = 4096;  // an OpenMP runtime that cannot start one ends the process

void check_options(const Options& o) {
  const auto bad = ErrorKind::usage;
  require(o.label_smoothing >= 0 && o.label_smoothing < 1, bad,
          "label_smoothing = {}: must lie in [0, 1)", o.label_smoothing);
  require(o.z_loss >= 0 && std::isfinite(o.z_loss), bad, "z_loss = {}: must be finite and >= 0",
          o.z_loss);
  require(o.softcap == 0 || (o.softcap > 0 && is_normal_fp32(o.softcap)), bad,
          "softcap = {}: must be finite and > 0, within fp32 (0 turns it off)", o.softcap);
  require(is_normal_fp32(o.logit_scale), bad,
          "logit_scale = {}: must be finite and not 0, within fp32", o.logit_scale);
  require(o.denominator != Denominator::given ||
              (std::isfinite(o.denominator_value) && o.denominator_value > 0),
          bad, "denominator = {}: a given denominator must be finite and > 0", o.denominator_value);
  require(o.workspace_limit_bytes >= 0 || o.workspace_limit_bytes == workspace_auto, bad,
          "workspace_limit = {} bytes: must be >= 0, or {} for auto", o.workspace_limit_bytes,
          workspace_auto);
  require(o.threads >= 0 && o.threads <= most_threads, bad, "threads = {}: must lie in [0, {}]",
          o.threads, most_threads);
  require(o.vocab >= 0, bad, "vocab = {}: must be >= 0", o.vocab);
}

void check_dtypes(const Inputs& in, const Outputs& out) {
  using enum DType;
  check_dtype("hidden", in.hidden, {f32, bf16, f16, f64});
  if (is_16bit(in.hidden.dtype))
    check_dtype("weight", in.weight, {in.hidden.dtype, f32});
  else
    check_dtype("weight", in.weight, {in.hidden.dtype});
  check_dtype("bias", in.bias, {in.weight.dtype, f32});
  check_dtype("targets", in.targets, {i32, i64});
  check_dtype("soft_target_ids", in.soft_target_ids, {i32, i64});
  for (const NamedTensor& n :
       {NamedTensor{"class_weight", &in.class_weight},
        NamedTensor{"token_weight", &in.token_weight}, NamedTensor{"token_scale", &in.token_scale},
        NamedTensor{"soft_target_probs", &in.soft_target_probs},
        NamedTensor{"upstream", &in.upstream}, NamedTensor{"upstream_lse", &in.upstream_lse},
        NamedTensor{"upstream_entropy", &in.upstream_entropy},
        NamedTensor{"saved_lse", &in.saved_lse},
        NamedTensor{"saved_target_logprob", &in.saved_target_logprob},
        NamedTensor{"loss", &out.loss}, NamedTensor{"lse", &out.lse},
        NamedTensor{"target_logprob", &out.target_logprob}, NamedTensor{"entropy", &out.entropy},
        NamedTensor{"accuracy", &out.accuracy}, NamedTensor{"topk_values", &out.topk_values},
        NamedTensor{"topk_logprobs", &out.topk_logprobs}})
    check_dtype(n.name, *n.tensor, {f32, f64});
  check_dtype("argmax", out.argmax, {i64});
  check_dtype("topk_ids", out.topk_ids, {i64});
  check_dtype("dx", out.dx, {in.hidden.dtype, f32, f64});
  check_dtype("dw", out.dw, {in.weight.dtype, f32, f64});
  check_dtype("dw_rest", out.dw_rest, {i32});
  check_dtype("dx_rest", out.dx_rest, {u8});
  check_dtype("db", out.db, {in.bias ? in.bias.dtype : in.weight.dtype, f32, f64});
  require(!out.accumulate_dw || !is_16bit(out.dw.dtype), data_error,
          "dw: accumulation needs an fp32 main gradient, not {}", name_of(out.dw.dtype));
  require(!out.accumulate_db || !is_16bit(out.db.dtype), data_error,
          "db: accumulation needs an fp32 buffer, not {}", name_of(out.db.dtype));
}

void check_shapes(const Problem& p, const Inputs& in, const Outputs& out) {
  const int64_t n = p.tokens, rows = in.hidden.shape[0];
  check_shape("hidden", in.hidden, {rows, p.hidden});
  check_shape("weight", in.weight, {p.vocab_stored, p.hidden});
  check_shape("bias", in.bias, {p.vocab_stored});
  check_shape("targets", in.targets, {n});
  check_shape("class_weight", in.class_weight, {p.vocab});
  check_shape("token_weight", in.token_weight, {n});
  check_shape("token_scale", in.token_scale, {n});
  check_shape("soft_target_ids", in.soft_target_ids, {n, p.soft_k});
  check_shape("soft_target_probs", in.soft_target_probs,
              {n, p.soft_targets == SoftTargets::dense ? p.vocab : p.soft_k});
  if (p.options.reduction == Reduction::none) {
    check_shape("loss", out.loss, {n});
    check_shape("upstream", in.upstream, {n});
  } else {
    check_shape("loss", out.loss, {});
    check_shape("upstream", in.upstream, {});
  }
  check_shape("upstream_lse", in.upstream_lse, {n});
  check_shape("upstream_entropy", in.upstream_entropy, {n});
  check_shape("saved_lse", in.saved_lse, {n});
  check_shape("saved_target_logprob", in.saved_target_logprob, {n});
  for (const NamedTensor& t :
       {NamedTensor{"lse", &out.lse}, NamedTensor{"target_logprob", &out.target_logprob},
        NamedTensor{"entropy", &out.entropy}, NamedTensor{"argmax", &out.argmax}})
    check_shape(t.name, *t.tensor, {n});
  check_shape("accuracy", out.accuracy, {});
  for (const NamedTensor& t :
       {NamedTensor{"topk_values", &out.topk_values}, NamedTensor{"topk_ids", &out.topk_ids},
        NamedTensor{"topk_logprobs", &out.topk_logprobs}})
    check_shape(t.name, *t.tensor, {n, p.top_k});
  check_shape("dx", out.dx, {rows, p.hidden});
  check_shape("dx_rest", out.dx_rest, {rows, dx_rest_columns(p.hidden)});
  check_shape("dw", out.dw, {p.vocab_stored, p.hidden});
  check_shape("db", out.db, {p.vocab_stored});
}

void check_presence(const Problem& p, const Inputs& in, const Outputs& out) {
  const auto usage = ErrorKind::usage;
  require(!(in.targets && in.soft_target_probs), usage,
          "targets and soft_target_probs: give one of them");
  require(!in.soft_target_ids || in.soft_target_probs, usage,
          "soft_target_ids: needs soft_target_probs beside it");
  const bool any = in.targets || in.soft_target_probs;
  require(any || !out.loss, usage, "loss: needs targets or soft_target_probs");
  require(in.targets || !out.target_logprob, usage, "target_logprob: needs targets");
  require(in.targets || !out.accuracy, usage, "accuracy: needs targets");
  require(any || !in.upstream, usage, "upstream: needs targets or soft_target_probs");
  require(any || !p.backward() || in.upstream_lse || in.upstream_entropy, usage,
          "{}: without targets a gradient needs upstream_lse or upstream_entropy",
          out.dx ? "dx" : "dw");
  require(in.bias || !out.db, usage, "db: needs a bias");
  require(!out.dw_rest || (out.dw && out.late_factor && is_16bit(out.dw.dtype)), usage,
          "dw_rest: needs a 16-bit dw and late_factor");
  require(!out.dx_rest || (out.dx && out.late_factor && out.dx.dtype == DType::bf16), usage,
          "dx_rest: needs a bf16 dx and late_factor");
  require(p.options.dw_sum == DType::f32 || p.options.dw_sum == p.weight_dtype, usage,
          "dw_sum = {}: fp32, or {} as the weight", name_of(p.options.dw_sum),
          name_of(p.weight_dtype));
  require(in.saved_lse.present == in.saved_target_logprob.present, usage,
          "saved_lse and saved_target_logprob: give both or neither");
  require(in.targets || !in.saved_lse, usage, "saved_lse: needs targets");
  require(p.top_k <= max_top_k, usage, "top-k = {}: at most {}", p.top_k, max_top_k);
  require(p.top_k <= p.vocab, usage, "top-k = {}: the vocabulary has {} entries", p.top_k, p.vocab);
  require(p.options.denominator_scope == DenominatorScope::local ||
              p.options.denominator != Denominator::given,
          usage, "denominator_scope = global: a given denominator is already global");
}

int64_t alignment_of(const Inputs& in, const Outputs& out) {
  uint64_t bits = 256;
  for (const Tensor* t : {&in.hidden, &in.weight, &out.dx, &out.dw, &out.dw_rest})
    if (*t) bits |= reinterpret_cast<uintptr_t>(t->data);
  return int64_t{1} << std::countr_zero(bits);
}

void fill_flags(Problem& p, const Inputs& in, const Outputs& out) {
  for (const auto& f : input_fields)
    if (f.present) p.*f.present = (in.*f.member).present;
  for (const auto& f : output_fields)
    if (f.present) p.*f.present = (out.*f.member).present;
  p.accumulate_dw = out.accumulate_dw;
  p.accumulate_db = out.accumulate_db;
  p.late_factor = out.late_factor;
  if (out.dw_rest) p.rest_bytes = out.dw_rest.elements() * int64_t{4};
  // Ranks are checked later; a tensor of another rank shows strides that nobody reads.
  if (out.dx) p.dx_dtype = out.dx.dtype;
  if (out.dx) p.dx_row_stride = out.dx.stride[0], p.dx_col_stride = out.dx.stride[1];
  if (out.dw) p.dw_dtype = out.dw.dtype;
  if (out.dw) p.dw_row_stride = out.dw.stride[0], p.dw_col_stride = out.dw.stride[1];
  if (in.bias) p.bias_dtype = in.bias.dtype, p.bias_stride = in.bias.stride[0];
  for (const Tensor* t : {&out.topk_values, &out.topk_ids, &out.topk_logprobs})
    if (*t && t->rank == 2) p.top_k = t->shape[1];
}

}  // namespace

Problem describe(const Inputs& in, const Outputs& out, const Options& options, const Ranks& ranks) {
  check_options(options);
  const auto inputs = tensors_of(in, input_fields), outputs = tensors_of(out, output_fields);
  check_views(inputs);
  check_views(outputs);
  const auto needs_matrix = [](const char* name, const Tensor& t, const char* shape) {
    if (t && t.rank == 2) return;
    fail(data_error, "{}: needed, with shape {}{}", name, shape, but_given(t));
  };
  needs_matrix("hidden", in.hidden, "[tokens, hidden]");
  needs_matrix("weight", in.weight, "[vocab, hidden]");
  Problem p;
  p.options = options;
  p.world = ranks.vocab ? ranks.vocab->size() : 1;
  p.rank = ranks.vocab ? ranks.vocab->rank() : 0;
  p.sequence_parallel = ranks.sequence_parallel;
  p.dx_sum = ranks.dx_sum;
  require(p.dx_sum == DType::f32 || p.dx_sum == DType::bf16, ErrorKind::usage,
          "dx_sum = {}: fp32 or bf16", name_of(p.dx_sum));
  p.tokens = in.hidden.shape[0] * (ranks.sequence_parallel ? p.world : 1);
  p.hidden = in.hidden.shape[1];
  p.vocab_stored = in.weight.shape[0];
  p.vocab_begin = ranks.vocab_begin;
  require(p.vocab_begin >= 0, ErrorKind::usage, "vocab_begin = {}: must be >= 0", p.vocab_begin);
  require(p.world == 1 || options.vocab > 0, ErrorKind::usage,
          "vocab = 0: with {} vocabulary ranks the logical vocabulary must be given", p.world);
  p.vocab = options.vocab > 0 ? options.vocab : p.vocab_begin + p.vocab_stored;
  require(p.vocab >= 1, data_error, "vocab = {}: at least one entry is needed", p.vocab);
  require(p.world > 1 || (p.vocab_begin == 0 && p.vocab <= p.vocab_stored), data_error,
          "vocab = {}: the weight holds only {} rows from {}", p.vocab, p.vocab_stored,
          p.vocab_begin);
  p.vocab_local = std::clamp<int64_t>(p.vocab - p.vocab_begin, 0, p.vocab_stored);
  p.device = in.hidden.device;
  p.device_index = in.hidden.device_index;
  p.hidden_dtype = in.hidden.dtype;
  p.weight_dtype = in.weight.dtype;
  p.hidden_row_stride = in.hidden.stride[0];
  p.hidden_col_stride = in.hidden.stride[1];
  p.weight_row_stride = in.weight.stride[0];
  p.weight_col_stride = in.weight.stride[1];
  p.alignment_bytes = alignment_of(in, out);
  if (in.soft_target_probs) {
    p.soft_targets = in.soft_target_ids ? SoftTargets::sparse : SoftTargets::dense;
    if (in.soft_target_ids.rank == 2) p.soft_k = in.soft_target_ids.shape[1];
  }
  fill_flags(p, in, out);
  check_presence(p, in, out);
  check_dtypes(in, out);
  check_shapes(p, in, out);
  check_devices({"hidden", &in.hidden}, inputs);
  check_devices({"hidden", &in.hidden}, outputs);
  check_overlap(inputs, outputs);
  return p;
}

}  // namespace talea::lce
