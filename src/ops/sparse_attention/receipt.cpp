// What: see receipt.hpp; field by field as the schema's "sparse_attention_call" lists them.
// Why: a fact that was not requested or not known is said so, never left out.
// Never: drops a number that is not finite: JSON has it as a string.
#include "ops/sparse_attention/receipt.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "ops/sparse_attention/fields.hpp"

namespace talea::sparse_attention {
namespace {

using json = nlohmann::json;

bool attends(Pass pass) { return pass == Pass::forward || pass == Pass::backward; }
bool indexes(Pass pass) { return pass == Pass::select || pass == Pass::index_loss; }

json dtypes_json(const Problem& p) {
  json j = json::object();
  if (p.pass != Pass::select) {
    j["q"] = name_of(p.q_dtype);
    j["kv"] = name_of(p.kv_dtype);
  }
  if (p.wants_o) j["o"] = name_of(p.o_dtype);
  if (p.wants_dq) j["dq"] = name_of(p.dq_dtype);
  if (p.wants_dkv) j["dkv"] = name_of(p.dkv_dtype);
  if (attends(p.pass)) j["indices"] = name_of(p.index_dtype);
  if (indexes(p.pass)) {
    j["index_q"] = name_of(p.index_q_dtype);
    j["index_weights"] = name_of(p.index_weights_dtype);
  }
  return j;
}

json problem_json(const CallFacts& f) {
  const Problem& p = f.problem;
  return {{"batch", p.batch},
          {"queries", p.queries},
          {"keys", p.keys},
          {"heads", p.heads},
          {"groups", p.groups},
          {"dim", p.dim},
          {"value_dim", p.value_dim},
          {"slots", p.slots},
          {"index_heads", p.index_heads},
          {"index_dim", p.index_dim},
          {"dtypes", dtypes_json(p)},
          {"layout", f.layout},
          {"index_space", word(p.options.index_space)},
          {"kv_storage", word(p.options.kv_storage)},
          {"paged", p.blocks > 0},
          {"sequences", p.sequences},
          {"device", p.device == DeviceKind::cuda ? "cuda" : "cpu"},
          {"outputs_requested", f.outputs}};
}

json options_json(const Problem& p) {
  const Options& o = p.options;
  json j = {{"scale", p.scale},
            {"causal", o.causal},
            {"q_position_base", o.q_position_base},
            {"index_check", word(o.index_check)},
            {"workspace_limit_bytes", o.workspace_limit_bytes},
            {"threads", o.threads},
            {"lane", o.lane}};
  if (attends(p.pass)) {
    j["fp8_path"] = word(o.fp8_path);
    j["dkv_sum"] = word(o.dkv_sum);
    j["operands"] = word(o.operands);
  }
  if (indexes(p.pass)) {
    j["act"] = word(p.act);
    j["key_stride"] = p.key_stride;
  }
  if (p.pass == Pass::index_loss) {
    j["keys"] = word(p.loss_keys);
    j["coeff"] = p.coeff;
  }
  return j;
}

json slots_json(const Result& r) {
  return {
      {"given", count_json(r.slots_given)},         {"valid", count_json(r.slots_valid)},
      {"absent", count_json(r.slots_absent)},       {"foreign", count_json(r.slots_foreign)},
      {"first_foreign_slot", r.first_foreign_slot}, {"first_foreign_value", r.first_foreign_value}};
}

json scores_json(const Result& r) {
  return {{"home", r.scores_home},
          {"tile_rows", r.scores_tile_rows},
          {"tile_keys", r.scores_tile_keys},
          {"tile_bytes", r.scores_tile_bytes},
          {"full_scores_bytes", r.full_scores_bytes}};
}

json kv_json(const Result& r) {
  return {{"path", r.kv_path},
          {"gathered_bytes", r.gathered_kv_bytes},
          {"dequantised_bytes", r.dequantised_kv_bytes},
          {"decode_segments", r.decode_segments}};
}

json numerics_json(const Result& r) {
  return {{"operands", r.operands},
          {"lse_base", r.lse_base},
          {"delta_source", r.delta_source},
          {"accumulator_o", r.accumulator_o},
          {"accumulator_dq", r.accumulator_dq},
          {"accumulator_dkv", r.accumulator_dkv},
          {"dkv_sum", r.dkv_sum},
          {"dkv_order", r.dkv_order},
          {"forward_repeated", r.forward_repeated}};
}

json indexer_json(const Result& r) {
  return {
      {"selection_rule", r.selection_rule},
      {"nan_scores", count_json(r.nan_scores)},
      {"loss", r.loss},
      {"denominator",
       {{"kind", r.denominator_kind}, {"scope", r.denominator_scope}, {"value", r.denominator}}}};
}

// What result and call say alike.
json facts_json(const Result& r) {
  json j = {
      {"operator", "sparse_attention"}, {"pass", name_of(r.pass)}, {"scores", scores_json(r)},
      {"slots", slots_json(r)},         {"kv", kv_json(r)},        {"numerics", numerics_json(r)},
      {"exchanges", r.exchanges},       {"notes", r.notes}};
  // The contract's names of two facts, for who looks for them without knowing where they stand.
  j["kv_path"] = r.kv_path;
  j["scores_home"] = r.scores_home;
  if (indexes(r.pass)) j["indexer"] = indexer_json(r);
  return j;
}

json ranks_json(const CallFacts& f) {
  json shares = json::array();
  for (const ShareFact& s : f.shares)
    shares.push_back({{"rank", s.rank},
                      {"begin", s.begin},
                      {"end", s.end},
                      {"ms", s.ms},
                      {"workspace_bytes", s.workspace_bytes}});
  return {{"cut", f.cut}, {"collective", f.collective}, {"shares", shares}};
}

}  // namespace

const char* name_of(Pass pass) { return word(pass); }

json call_json(const CallFacts& f) {
  const Result& r = f.result;
  json j = facts_json(r);
  j["problem"] = problem_json(f);
  j["options"] = options_json(f.problem);
  j["inputs"] = inputs_json(f.inputs);
  j["boundary"] = {
      {"lane", r.lane}, {"lane_kind", r.lane_kind}, {"declined", declined_json(r.declined)}};
  j["ranks"] = ranks_json(f);
  j["cost"] = {{"workspace_bytes", r.workspace_bytes},
               {"measured_peak_extra_bytes", count_json(f.measured_peak_extra_bytes)},
               {"measured_by", f.measured_by},
               {"flops", r.flops},
               {"time", f.time ? talea::to_json(*f.time) : json(nullptr)},
               {"ratio_to_plain_products",
                f.ratio_to_plain_products ? json(*f.ratio_to_plain_products) : json(nullptr)}};
  return j;
}

std::string result_text(const Result& r) {
  json j = facts_json(r);
  j["version"] = build_info().version;
  j["lane"] = r.lane;
  j["lane_kind"] = r.lane_kind;
  j["declined"] = declined_json(r.declined);
  j["workspace_bytes"] = r.workspace_bytes;
  j["flops"] = r.flops;
  return one_line(std::move(j));
}

}  // namespace talea::sparse_attention
