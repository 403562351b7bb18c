// What: results and lane choices as plain structs, text and JSON, of any operator.
// Why: one place turns C++ values into what a C caller can read.
// Never: drops a number that is not finite: JSON has it as a string.
#include "capi/result.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "capi/guarded.hpp"
#include "core/fail.hpp"

namespace talea::capi {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

std::string choice_json(const char* op, const LaneChoice& choice) {
  Json declined = Json::array();
  for (const LaneDecline& d : choice.declined)
    declined.push_back({{"lane", d.lane}, {"reason", d.reason}});
  Json j;
  j["operator"] = op;
  j["lane"] = choice.lane.empty() ? Json() : Json(choice.lane);
  j["lane_kind"] = choice.lane_kind;
  j["declined"] = declined;
  j["workspace_bytes"] = choice.workspace_bytes;
  j["flops"] = number(choice.flops);
  if (choice.workspace_limit_bytes >= 0) j["workspace_limit_bytes"] = choice.workspace_limit_bytes;
  j["details"] = choice.details;
  return j.dump();
}

std::string choice_text(const LaneChoice& choice) {
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

}  // namespace

std::vector<talea_lane_decline> c_declines(const std::vector<LaneDecline>& declined) {
  std::vector<talea_lane_decline> list;
  for (const LaneDecline& d : declined) list.push_back({d.lane.c_str(), d.reason.c_str()});
  return list;
}

std::vector<const char*> c_strings(const std::vector<std::string>& strings) {
  std::vector<const char*> list;
  for (const std::string& s : strings) list.push_back(s.c_str());
  return list;
}

std::string comma_list(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ",") + name;
  return list;
}

void check_buffer(const TextBuffer& b) {
  require(b.format == TALEA_TEXT || b.format == TALEA_JSON, ErrorKind::usage,
          "format = {}: must be 0 (text) or 1 (JSON)", b.format);
  require(b.bytes >= 0 && (b.data || b.bytes == 0), ErrorKind::usage, "buffer: {} bytes at {}",
          b.bytes, b.data ? "an address" : "null");
}

void write_choice(const char* op, const LaneChoice& choice, const TextBuffer& b) {
  const std::string text = b.format == TALEA_JSON ? choice_json(op, choice) : choice_text(choice);
  if (b.needed) *b.needed = static_cast<int64_t>(text.size()) + 1;
  if (b.bytes == 0) return;
  const size_t n = std::min(text.size(), static_cast<size_t>(b.bytes - 1));
  std::memcpy(b.data, text.data(), n);
  b.data[n] = 0;
}

void log_lanes(const char* op, const std::string& lane, const std::vector<LaneDecline>& declined,
               const std::string& cost) {
  for (const LaneDecline& d : declined)
    log(TALEA_LOG_DEBUG, fmt::format("{}: lane {} declined: {}", op, d.lane, d.reason));
  log(TALEA_LOG_INFO, fmt::format("{}: lane {}, {}", op, lane, cost));
}

}  // namespace talea::capi

extern "C" {

const char* talea_result_json(const talea_result* result) {
  return result ? result->json.c_str() : nullptr;
}

void talea_result_free(talea_result* result) { delete result; }

}  // extern "C"
