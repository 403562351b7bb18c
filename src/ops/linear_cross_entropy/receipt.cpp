// What: CallFacts -> JSON, field by field as the schema lists them.
// Why: a fact that was not requested or not known is said so, never left out.
// Never: computes a result; it only names what the library reported.
#include "ops/linear_cross_entropy/receipt.hpp"

#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/fields.hpp"

namespace talea::lce {
namespace {

using json = nlohmann::json;

json options_json(const Options& o) {
  json all = json::object();
  for_each_field(option_fields, [&](const auto& f) {
    const auto& value = o.*f.member;
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>)
      all[f.name] = word(value);
    else
      all[f.name] = value;
  });
  if (o.workspace_limit_bytes == workspace_auto) all["workspace_limit_bytes"] = "auto";
  return all;
}

// The names of the tensors that are given or asked for; soft targets and top-k, which are several
// tensors, by one.
json inputs_present(const Problem& p) {
  json list = json::array();
  for (const auto& f : input_fields) {
    if (f.present && p.*f.present) list.push_back(f.name);
    if (f.member == &Inputs::soft_target_probs && p.soft_targets != SoftTargets::none)
      list.push_back("soft_targets");
  }
  return list;
}

json outputs_requested(const Problem& p) {
  json list = json::array();
  for (const auto& f : output_fields) {
    if (f.present && p.*f.present) list.push_back(f.name);
    if (f.member == &Outputs::topk_values && p.top_k > 0) list.push_back("topk");
  }
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
          {"soft_targets", word(p.soft_targets)},
          {"soft_k", p.soft_k},
          {"top_k", p.top_k},
          {"inputs_present", inputs_present(p)},
          {"outputs_requested", outputs_requested(p)},
          {"accumulate_dw", p.accumulate_dw},
          {"accumulate_db", p.accumulate_db}};
}

// The facts of the run, each in its place.
json facts_json(const Result& r) {
  json all = json::object();
  for_each_field(fact_fields,
                 [&](const auto& f) { all[json::json_pointer(f.about)] = r.*f.member; });
  return all;
}

json boundary_json(const Result& r) {
  return {{"kind", r.full_logits_tensor ? "plain projection + loss" : "fused boundary"},
          {"owner", "talea owns projection and loss"},
          {"lane", r.lane},
          {"lane_kind", r.lane_kind},
          {"declined", declined_json(r.declined)}};
}

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
       {{"kind", p.options.reduction == Reduction::mean ? word(p.options.denominator) : "not used"},
        {"scope", word(p.options.denominator_scope)},
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
  const Result& r = f.result;
  return {{"workspace_bytes", r.workspace_bytes},
          {"chunk_rows", r.chunk_rows},
          {"chunks", r.chunks},
          {"measured_peak_extra_bytes", count_json(f.measured_peak_extra_bytes)},
          {"measured_by", f.measured_by},
          {"flops", r.flops},
          {"products", r.products},
          {"time", f.time ? to_json(*f.time) : json(nullptr)},
          {"ratio_to_plain_products",
           f.ratio_to_plain_products ? json(*f.ratio_to_plain_products) : json(nullptr)}};
}

}  // namespace

json call_json(const CallFacts& f) {
  const json facts = facts_json(f.result);
  json logits = facts["logits"];
  logits["full_tensor_evidence"] =
      f.full_logits_measured ? "measured by the allocator" : "reported by the lane";
  json problem = problem_json(f.problem, f.layout);
  if (f.problem.wants_dx && f.problem.world > 1) problem["dx_sum"] = word(f.problem.dx_sum);
  return {{"operator", "linear_cross_entropy"},
          {"problem", problem},
          {"options", options_json(f.problem.options)},
          {"seed", f.seed ? json(*f.seed) : json(nullptr)},
          {"inputs", inputs_json(f.inputs)},
          {"boundary", boundary_json(f.result)},
          {"logits", logits},
          {"accumulators", facts["accumulators"]},
          {"reductions", reductions_json(f)},
          {"consumers", consumers_json(f.problem)},
          {"penalties", penalties_json(f)},
          {"cost", cost_json(f)},
          {"values", values_json(f)},
          {"notes", f.result.notes}};
}

std::string result_text(const Result& r) {
  json all = facts_json(r);
  all["operator"] = "linear_cross_entropy";
  all["version"] = build_info().version;
  all["declined"] = declined_json(r.declined);
  all["notes"] = r.notes;
  return one_line(std::move(all));
}

}  // namespace talea::lce
