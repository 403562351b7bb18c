// What: results and lane choices as plain structs, text and JSON.
// Why: one place turns C++ values into what a C caller can read.
// Never: drops a number that is not finite: JSON has it as a string.
#include "capi/result.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "capi/guarded.hpp"
#include "core/receipt.hpp"

namespace talea::capi {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json declined_json(const std::vector<LaneDecline>& declined) {
  Json list = Json::array();
  for (const LaneDecline& d : declined) list.push_back({{"lane", d.lane}, {"reason", d.reason}});
  return list;
}

void fill_facts(talea_result& to) {
  const LinearCrossEntropyResult& r = to.result;
  for (const LaneDecline& d : r.declined) to.declined.push_back({d.lane.c_str(), d.reason.c_str()});
  for (const std::string& n : r.notes) to.notes.push_back(n.c_str());
  talea_linear_cross_entropy_facts& f = to.facts;
  f.struct_bytes = sizeof(f);
  f.lane = r.lane.c_str();
  f.lane_kind = r.lane_kind.c_str();
  f.logits_home = r.logits_home.c_str();
  f.accumulator_softmax = r.accumulator_softmax.c_str();
  f.accumulator_dx = r.accumulator_dx.c_str();
  f.accumulator_dw = r.accumulator_dw.c_str();
  f.accumulator_loss = r.accumulator_loss.c_str();
  f.upstream_handling = r.upstream_handling.c_str();
  f.merges = r.merges.c_str();
  f.logits_tile_rows = r.logits_tile_rows;
  f.logits_tile_columns = r.logits_tile_columns;
  f.logits_tile_bytes = r.logits_tile_bytes;
  f.chunk_rows = r.chunk_rows;
  f.chunks = r.chunks;
  f.workspace_bytes = r.workspace_bytes;
  f.flops = r.flops;
  f.valid_tokens = r.valid_tokens;
  f.ignored_tokens = r.ignored_tokens;
  f.out_of_range_tokens = r.out_of_range_tokens;
  f.targets_in_partition = r.targets_in_partition;
  f.denominator = r.denominator;
  f.full_logits_tensor = r.full_logits_tensor;
  f.declined_count = static_cast<int32_t>(to.declined.size());
  f.declined = to.declined.data();
  f.notes = to.notes.data();
  f.notes_count = static_cast<int32_t>(to.notes.size());
}

}  // namespace

talea_result* make_result(LinearCrossEntropyResult result) {
  auto made = std::make_unique<talea_result>();
  made->result = std::move(result);
  fill_facts(*made);
  made->json = result_text(made->result);
  return made.release();
}

std::string explain_json(const LaneChoice& choice) {
  Json j;
  j["operator"] = "linear_cross_entropy";
  j["lane"] = choice.lane.empty() ? Json() : Json(choice.lane);
  j["lane_kind"] = choice.lane_kind;
  j["declined"] = declined_json(choice.declined);
  j["workspace_bytes"] = choice.workspace_bytes;
  j["flops"] = number(choice.flops);
  j["details"] = choice.details;
  return j.dump();
}

std::string explain_text(const LaneChoice& choice) {
  std::string text =
      choice.lane.empty()
          ? "no lane takes this problem\n"
          : fmt::format("lane = {} ({})\nworkspace_bytes = {}\nflops = {:.6g}\n", choice.lane,
                        choice.lane_kind, choice.workspace_bytes, choice.flops);
  for (const std::string& d : choice.details) text += d + "\n";
  for (const LaneDecline& d : choice.declined)
    text += fmt::format("declined {}: {}\n", d.lane, d.reason);
  return text;
}

}  // namespace talea::capi

extern "C" {

const talea_linear_cross_entropy_facts* talea_linear_cross_entropy_result_facts(
    const talea_result* result) {
  return result ? &result->facts : nullptr;
}

const char* talea_result_json(const talea_result* result) {
  return result ? result->json.c_str() : nullptr;
}

void talea_result_free(talea_result* result) { delete result; }

}  // extern "C"
