// What: Problem and Result -> JSON, as the schema's definition "mamba3_call" lists them.
// Why: a fact that is not known is said so, never left out.
// Never: computes a result; it only names what the library reported.
#include "ops/mamba3/receipt.hpp"

#include <nlohmann/json.hpp>

#include "core/provenance.hpp"
#include "ops/mamba3/fields.hpp"

namespace talea::mamba3 {
namespace {

using json = nlohmann::json;

json options_json(const Options& o) {
  return {{"rotary_pairs", word(o.rotary_pairs)},
          {"sequence_check", word(o.sequence_check)},
          {"schedule", word(o.schedule)},
          {"head_norm", o.head_norm},
          {"norm_eps", o.norm_eps},
          {"chunk", o.chunk},
          {"workspace_limit_bytes", o.workspace_limit_bytes},
          {"threads", o.threads},
          {"lane", o.lane}};
}

json dtypes_json(const Problem& p) {
  json list = json::object();
  const auto add = [&](const char* name, const Tensor& t) {
    if (t) list[name] = talea::name_of(t.dtype);
  };
  for_inputs(p.in, add);
  for_outputs(p.out, add);
  return list;
}

json problem_json(const Problem& p, const std::string& layout) {
  json strides = json::array();
  for (int i = 0; i < p.in.q.rank; ++i) strides.push_back(p.in.q.stride[i]);
  return {{"pass", word(p.pass)},
          {"batch", p.batch},
          {"tokens", p.tokens},
          {"sequences", p.sequences},
          {"heads", p.heads},
          {"groups", p.groups},
          {"state_dim", p.state_dim},
          {"head_dim", p.head_dim},
          {"rank", p.rank},
          {"pairs", p.pairs},
          {"packed", p.packed},
          {"rank_axis", p.rank_axis},
          {"shared_angles", p.shared_angles},
          {"device", p.device == DeviceKind::cuda ? "cuda" : "cpu"},
          {"dtypes", dtypes_json(p)},
          {"layout", layout},
          {"q_strides", strides},
          {"heads_world", p.heads_world},
          {"sequence_world", p.sequence_world}};
}

json products_json(const Result& r) {
  json list = json::array();
  for (const ProductFact& f : r.products)
    list.push_back({{"name", f.name}, {"per_chunk", f.per_chunk}, {"flops", f.flops}});
  return list;
}

json exchanges_json(const Result& r) {
  json list = json::array();
  for (const ExchangeFact& f : r.exchanges)
    list.push_back({{"name", f.name}, {"collective", f.collective}, {"bytes", f.bytes}});
  return list;
}

json accumulators_json(const Result& r) {
  return {{"angle", r.accumulator_angle},  {"decay", r.accumulator_decay},
          {"state", r.accumulator_state},  {"state_gradient", r.accumulator_state_gradient},
          {"rows", r.accumulator_rows},    {"parameters", r.accumulator_parameters},
          {"groups", r.accumulator_groups}};
}

// The facts that the result of the C interface and a receipt share.
json ran_json(const Result& r) {
  return {{"lane", r.lane},
          {"lane_kind", r.lane_kind},
          {"declined", declined_json(r.declined)},
          {"pass", word(r.pass)},
          {"rotary_pairs", word(r.rotary_pairs)},
          {"schedule", word(r.schedule)},
          {"chunk_tokens", r.chunk_tokens},
          {"chunk_rows", r.chunk_rows},
          {"threads", r.threads},
          {"memory_order", r.memory_order},
          {"state_home", r.state_home},
          {"state_dtype", r.state_dtype},
          {"accumulators", accumulators_json(r)},
          {"products", products_json(r)},
          {"shared_product", r.shared_product},
          {"per_head_bytes", r.per_head_bytes},
          {"quadratic_bytes", r.quadratic_bytes},
          {"states_from", r.states_from_saved ? "saved" : "recomputed"},
          {"segment_chunks", r.segment_chunks},
          {"saved_bytes", r.saved_bytes},
          {"workspace_bytes", r.workspace_bytes},
          {"flops", r.flops},
          {"exchanges", exchanges_json(r)},
          {"padding_tokens", count_json(r.padding_tokens)},
          {"bad_entries", count_json(r.bad_entries)},
          {"bad_slots", count_json(r.bad_slots)},
          {"notes", r.notes}};
}

json cost_json(const CallFacts& f) {
  return {{"workspace_bytes", f.result.workspace_bytes},
          {"measured_peak_extra_bytes", count_json(f.measured_peak_extra_bytes)},
          {"measured_by", f.measured_by},
          {"useful_flops", useful_flops(f.problem, f.result.chunk_tokens)},
          {"time", f.time ? to_json(*f.time) : json(nullptr)},
          {"ratio_to_plain_product",
           f.ratio_to_plain_product ? json(*f.ratio_to_plain_product) : json(nullptr)}};
}

}  // namespace

json call_json(const CallFacts& f) {
  json pieces = json::array();
  for (const PieceFact& p : f.pieces)
    pieces.push_back({{"rank", p.rank},
                      {"heads", {p.head_begin, p.head_end}},
                      {"tokens", {p.token_begin, p.token_end}}});
  return {{"operator", "mamba3"},
          {"problem", problem_json(f.problem, f.layout)},
          {"options", options_json(f.problem.options)},
          {"inputs", inputs_json(f.inputs)},
          {"ran", ran_json(f.result)},
          {"pieces", pieces},
          {"collective", f.collective},
          {"cost", cost_json(f)},
          {"values", values_json(f)}};
}

std::string result_text(const Result& result) {
  json document = ran_json(result);
  document["operator"] = "mamba3";
  document["version"] = build_info().version;
  return one_line(std::move(document));
}

}  // namespace talea::mamba3
