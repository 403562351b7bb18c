// What: CallFacts -> JSON, field by field as the schema's definition "call" lists them.
// Why: a fact that was not requested or not known is said so, never left out.
// Never: computes a result; it only names what the library reported.
#include "core/receipt_call.hpp"

#include <nlohmann/json.hpp>

#include "core/fail.hpp"

namespace talea {
namespace {

using json = nlohmann::json;
using Problem = LinearCrossEntropyProblem;
using Options = LinearCrossEntropyOptions;

std::string pick(int index, std::initializer_list<const char*> names) {
  require(index >= 0 && index < static_cast<int>(names.size()), ErrorKind::usage,
          "receipt: enumerator {} has no name", index);
  return names.begin()[index];
}

std::string reduction_name(const Options& o) {
  return pick(static_cast<int>(o.reduction), {"none", "sum", "mean"});
}
std::string denominator_name(const Options& o) {
  return pick(static_cast<int>(o.denominator), {"valid", "weighted", "given"});
}
std::string scope_name(const Options& o) {
  return pick(static_cast<int>(o.denominator_scope), {"local", "global"});
}

json options_json(const Options& o) {
  return {
      {"reduction", reduction_name(o)},
      {"denominator", denominator_name(o)},
      {"denominator_value", o.denominator_value},
      {"denominator_scope", scope_name(o)},
      {"on_empty", pick(static_cast<int>(o.on_empty), {"nan", "zero"})},
      {"target_check", pick(static_cast<int>(o.target_check), {"automatic", "checked", "poison"})},
      {"ignore_index", o.ignore_index},
      {"vocab", o.vocab},
      {"label_smoothing", o.label_smoothing},
      {"z_loss", o.z_loss},
      {"softcap", o.softcap},
      {"logit_scale", o.logit_scale},
      {"workspace_limit_bytes", o.workspace_limit_bytes},
      {"threads", o.threads},
      {"lane", o.lane}};
}

// The names of the flags that are set.
json names_of(std::initializer_list<std::pair<const char*, bool>> flags) {
  json list = json::array();
  for (const auto& [name, set] : flags)
    if (set) list.push_back(name);
  return list;
}

json dtype_if(bool present, DType dtype) { return present ? json(name_of(dtype)) : json(nullptr); }

json problem_json(const Problem& p, const std::string& layout) {
  return {{"tokens", p.tokens},
          {"hidden", p.hidden},
          {"vocab", p.vocab},
          {"vocab_stored", p.vocab_stored},
          {"vocab_begin", p.vocab_begin},
          {"vocab_local", p.vocab_local},
          {"rank", p.rank},
          {"world", p.world},
          {"layout", layout},
          {"sequence_parallel", p.sequence_parallel},
          {"device", p.device == DeviceKind::cuda ? "cuda" : "cpu"},
          {"device_index", p.device_index},
          {"hidden_dtype", name_of(p.hidden_dtype)},
          {"weight_dtype", name_of(p.weight_dtype)},
          {"bias_dtype", dtype_if(p.has_bias, p.bias_dtype)},
          {"dx_dtype", dtype_if(p.wants_dx, p.dx_dtype)},
          {"dw_dtype", dtype_if(p.wants_dw, p.dw_dtype)},
          {"hidden_strides", {p.hidden_row_stride, p.hidden_col_stride}},
          {"weight_strides", {p.weight_row_stride, p.weight_col_stride}},
          {"alignment_bytes", p.alignment_bytes},
          {"soft_targets", pick(static_cast<int>(p.soft_targets), {"none", "dense", "sparse"})},
          {"soft_k", p.soft_k},
          {"top_k", p.top_k},
          {"inputs_present", names_of({{"targets", p.has_targets},
                                       {"bias", p.has_bias},
                                       {"class_weight", p.has_class_weight},
                                       {"token_weight", p.has_token_weight},
                                       {"token_scale", p.has_token_scale},
                                       {"soft_targets", p.soft_targets != SoftTargets::none},
                                       {"upstream", p.has_upstream},
                                       {"upstream_lse", p.has_upstream_lse},
                                       {"upstream_entropy", p.has_upstream_entropy},
                                       {"saved_lse", p.has_saved},
                                       {"saved_target_logprob", p.has_saved}})},
          {"outputs_requested", names_of({{"loss", p.wants_loss},
                                          {"lse", p.wants_lse},
                                          {"target_logprob", p.wants_logprob},
                                          {"entropy", p.wants_entropy},
                                          {"argmax", p.wants_argmax},
                                          {"accuracy", p.wants_accuracy},
                                          {"topk", p.top_k > 0},
                                          {"dx", p.wants_dx},
                                          {"dw", p.wants_dw},
                                          {"db", p.wants_db}})},
          {"accumulate_dw", p.accumulate_dw}};
}

json inputs_json(const std::vector<InputFact>& inputs) {
  json list = json::array();
  for (const InputFact& i : inputs)
    list.push_back({{"name", i.name},
                    {"source", i.source},
                    {"dtype", name_of(i.dtype)},
                    {"shape", i.shape},
                    {"sha256", i.sha256}});
  return list;
}

json declined_json(const LinearCrossEntropyResult& r) {
  json declined = json::array();
  for (const LaneDecline& d : r.declined)
    declined.push_back({{"lane", d.lane}, {"reason", d.reason}});
  return declined;
}

json logits_json(const LinearCrossEntropyResult& r) {
  return {{"home", r.logits_home},
          {"tile_rows", r.logits_tile_rows},
          {"tile_columns", r.logits_tile_columns},
          {"tile_bytes", r.logits_tile_bytes},
          {"full_tensor", r.full_logits_tensor}};
}

json accumulators_json(const LinearCrossEntropyResult& r) {
  return {{"softmax", r.accumulator_softmax},
          {"dx", r.accumulator_dx},
          {"dw", r.accumulator_dw},
          {"loss", r.accumulator_loss}};
}

json boundary_json(const LinearCrossEntropyResult& r) {
  return {{"kind", r.full_logits_tensor ? "plain projection + loss" : "fused boundary"},
          {"owner", "talea owns projection and loss"},
          {"lane", r.lane},
          {"lane_kind", r.lane_kind},
          {"declined", declined_json(r)}};
}

// -1 in the result: the count lives in device memory and was not read.
json count_json(int64_t count) { return count < 0 ? json(nullptr) : json(count); }

json reductions_json(const CallFacts& f) {
  const Problem& p = f.problem;
  json shards = json::array();
  for (const ShardFact& s : f.shards)
    shards.push_back({{"rank", s.rank}, {"begin", s.begin}, {"end", s.end}});
  if (shards.empty())
    shards.push_back(
        {{"rank", p.rank}, {"begin", p.vocab_begin}, {"end", p.vocab_begin + p.vocab_local}});
  return {
      {"merges", f.result.merges},
      {"collective", f.collective},
      {"shards", shards},
      {"padding_mask", fmt::format("rows [{}, {}) of the stored shard are padding: never read, "
                                   "gradient 0",
                                   p.vocab_local, p.vocab_stored)},
      {"valid_tokens", count_json(f.result.valid_tokens)},
      {"ignored_tokens", count_json(f.result.ignored_tokens)},
      {"out_of_range_tokens", count_json(f.result.out_of_range_tokens)},
      {"targets_in_partition", count_json(f.result.targets_in_partition)},
      {"denominator",
       {{"kind", p.options.reduction == Reduction::mean ? denominator_name(p.options) : "not used"},
        {"scope", scope_name(p.options)},
        {"value", f.result.denominator}}}};
}

json consumers_json(const Problem& p) {
  const auto served = [](bool wanted) { return wanted ? "inside the boundary" : "not requested"; };
  return {{"lse", served(p.wants_lse)},         {"target_logprob", served(p.wants_logprob)},
          {"entropy", served(p.wants_entropy)}, {"argmax", served(p.wants_argmax)},
          {"top_k", served(p.top_k > 0)},       {"accuracy", served(p.wants_accuracy)}};
}

json penalties_json(const CallFacts& f) {
  const Problem& p = f.problem;
  const auto place = [](bool used, const char* where) { return used ? where : "not used"; };
  const bool upstream = p.has_upstream || p.has_upstream_lse || p.has_upstream_entropy;
  return {
      {"label_smoothing", place(p.options.label_smoothing > 0,
                                "in the loss of a row and in dz, over the global vocabulary")},
      {"z_loss", place(p.options.z_loss > 0,
                       "zeta lse^2 in the loss of a row and in dz, not scaled by class weight")},
      {"softcap",
       place(p.options.softcap > 0, "on the logit before the softmax; its derivative in dz")},
      {"class_weight", place(p.has_class_weight, "on each row's cross-entropy, before the sum")},
      {"token_weight", place(p.has_token_weight, "on each row's whole loss, z-loss included")},
      {"upstream", upstream ? f.result.upstream_handling : "counts as 1"}};
}

json cost_json(const CallFacts& f) {
  const LinearCrossEntropyResult& r = f.result;
  return {{"workspace_bytes", r.workspace_bytes},
          {"chunk_rows", r.chunk_rows},
          {"chunks", r.chunks},
          {"measured_peak_extra_bytes", count_json(f.measured_peak_extra_bytes)},
          {"measured_by", f.measured_by},
          {"flops", r.flops},
          {"time", f.time ? to_json(*f.time) : json(nullptr)},
          {"ratio_to_plain_products",
           f.ratio_to_plain_products ? json(*f.ratio_to_plain_products) : json(nullptr)}};
}

}  // namespace

json to_json(const CallFacts& f) {
  const LinearCrossEntropyResult& r = f.result;
  json values = json::object();
  for (const auto& [name, value] : f.values) values[name] = value;
  json logits = logits_json(r);
  logits["full_tensor_evidence"] =
      f.full_logits_measured ? "measured by the allocator" : "reported by the lane";
  json problem = problem_json(f.problem, f.layout);
  if (f.problem.wants_dx && f.problem.world > 1) problem["dx_sum"] = name_of(f.problem.dx_sum);
  return {{"operator", "linear_cross_entropy"},
          {"problem", problem},
          {"options", options_json(f.problem.options)},
          {"seed", f.seed ? json(*f.seed) : json(nullptr)},
          {"inputs", inputs_json(f.inputs)},
          {"boundary", boundary_json(r)},
          {"logits", logits},
          {"accumulators", accumulators_json(r)},
          {"reductions", reductions_json(f)},
          {"consumers", consumers_json(f.problem)},
          {"penalties", penalties_json(f)},
          {"cost", cost_json(f)},
          {"values", values},
          {"notes", r.notes}};
}

json to_json(const LinearCrossEntropyResult& r) {
  return {{"operator", "linear_cross_entropy"},
          {"version", build_info().version},
          {"lane", r.lane},
          {"lane_kind", r.lane_kind},
          {"declined", declined_json(r)},
          {"logits", logits_json(r)},
          {"chunk_rows", r.chunk_rows},
          {"chunks", r.chunks},
          {"workspace_bytes", r.workspace_bytes},
          {"flops", r.flops},
          {"accumulators", accumulators_json(r)},
          {"upstream_handling", r.upstream_handling},
          {"merges", r.merges},
          {"valid_tokens", r.valid_tokens},
          {"ignored_tokens", r.ignored_tokens},
          {"out_of_range_tokens", r.out_of_range_tokens},
          {"targets_in_partition", r.targets_in_partition},
          {"denominator", r.denominator},
          {"notes", r.notes}};
}

}  // namespace talea
