// What: the envelope of a receipt, its text form and its way back.
// Why: what is written and what is read pass the same schema.
// Never: knows an operator; ops/<operator>/receipt.cpp describe a call.
#include "core/receipt.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/strict_json.hpp"

namespace talea {
namespace {

using json = nlohmann::json;
constexpr int max_depth = 32;

const char* name_of(ReceiptKind kind) {
  constexpr const char* names[] = {"loss",  "check",  "bench", "train",
                                   "repro", "attend", "index", "scan"};
  return names[static_cast<int>(kind)];
}

const char* name_of(Verdict verdict) {
  constexpr const char* names[] = {"passed", "failed", "not_checked"};
  return names[static_cast<int>(verdict)];
}

// JSON has no NaN and no infinity; the library would write null.
json spelled_out(json value) {
  if (value.is_structured()) {
    for (json& child : value) child = spelled_out(std::move(child));
  } else if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number > 0 ? "Infinity" : "-Infinity";
  }
  return value;
}

// Receipts of before 0.2.0 have an empty string where a call now says what was not requested.
void spell_out_empty(json& part) {
  if (part == "") part = "not requested";
  if (part.is_structured())
    for (json& child : part) spell_out_empty(child);
}

json pairs(const TextPairs& list) {
  json object = json::object();
  for (const auto& [name, text] : list) object[name] = text;
  return object;
}

json to_json(const Provenance& p) {
  json device = nullptr;
  if (p.device)
    device = {{"name", p.device->name},
              {"driver", p.device->driver},
              {"runtime", p.device->runtime},
              {"clocks", p.device->clocks},
              {"throttle_reasons", p.device->throttle_reasons}};
  const json dirty = p.build.git_dirty < 0 ? json(nullptr) : json(p.build.git_dirty != 0);
  return {{"version", p.build.version},
          {"git_revision", p.build.git_revision},
          {"git_dirty", dirty},
          {"build",
           {{"compiler", p.build.compiler},
            {"type", p.build.type},
            {"flags", p.build.flags},
            {"options", p.build.options}}},
          {"argv", p.argv},
          {"host", {{"cpu", p.cpu}, {"isa", p.isa}, {"threads", p.threads}, {"os", p.os}}},
          {"device", device},
          {"libraries", pairs(p.libraries)},
          {"environment", pairs(p.environment)},
          {"start_time", p.start_time},
          {"end_time", p.end_time}};
}

}  // namespace

TimeStats time_stats(std::vector<double> samples_ms) {
  require(!samples_ms.empty(), ErrorKind::usage, "time_stats: no samples");
  std::sort(samples_ms.begin(), samples_ms.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(samples_ms.size() - 1);
    const auto low = static_cast<size_t>(place);
    const size_t high = std::min(low + 1, samples_ms.size() - 1);
    return samples_ms[low] +
           (place - static_cast<double>(low)) * (samples_ms[high] - samples_ms[low]);
  };
  return {at(0.5), at(0.2), at(0.8), static_cast<int64_t>(samples_ms.size())};
}

int calls_per_sample(double call_ms) {
  constexpr double least_sample_ms = 25, most_calls = 1000;
  require(call_ms >= 0, ErrorKind::usage, "calls_per_sample: call_ms = {}", call_ms);
  if (call_ms * most_calls <= least_sample_ms) return static_cast<int>(most_calls);
  return static_cast<int>(std::ceil(least_sample_ms / call_ms));
}

json to_json(const TimeStats& t) {
  return {{"median_ms", t.median_ms}, {"p20_ms", t.p20_ms}, {"p80_ms", t.p80_ms}, {"n", t.n}};
}

json to_json(const ErrorFigure& e) {
  return {{"tensor", e.tensor},
          {"lane", e.lane},
          {"passed", e.passed},
          {"abs", e.abs},
          {"rel", e.rel},
          {"rel_l2", e.rel_l2},
          {"ulp", e.ulp},
          {"worst_index", e.worst_index},
          {"ours", e.ours},
          {"truth", e.truth},
          {"eager_abs", e.eager_abs},
          {"eager_rel_l2", e.eager_rel_l2},
          {"tolerance", e.tolerance}};
}

double number_of(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  fail(ErrorKind::invalid_data, "{} is no number",
       value.is_string() ? quote(value.get<std::string>()) : value.type_name());
}

Receipt::Receipt() : document_(std::make_unique<json>(json::object())) {}
Receipt::Receipt(const Receipt& other) : document_(std::make_unique<json>(*other.document_)) {}
Receipt::Receipt(Receipt&&) noexcept = default;
Receipt& Receipt::operator=(Receipt other) noexcept {
  document_.swap(other.document_);
  return *this;
}
Receipt::~Receipt() = default;

Receipt::Receipt(ReceiptKind kind, const Provenance& provenance) : Receipt() {
  *document_ = {{"schema_version", 1},
                {"kind", name_of(kind)},
                {"verdict", name_of(Verdict::not_checked)},
                {"provenance", to_json(provenance)}};
}

Receipt& Receipt::verdict(Verdict verdict) {
  (*document_)["verdict"] = name_of(verdict);
  return *this;
}

Receipt& Receipt::title(const std::string& text) {
  (*document_)["title"] = text;
  return *this;
}

Receipt& Receipt::call(json section) {
  (*document_)["calls"].push_back(spelled_out(std::move(section)));
  return *this;
}

Receipt& Receipt::error(const ErrorFigure& figure) {
  (*document_)["errors"].push_back(spelled_out(to_json(figure)));
  return *this;
}

Receipt& Receipt::note(const std::string& text) {
  (*document_)["notes"].push_back(text);
  return *this;
}

Receipt& Receipt::section(const std::string& name, json value) {
  (*document_)[name] = spelled_out(std::move(value));
  return *this;
}

std::string one_line(json value) {
  return spelled_out(std::move(value)).dump(-1, ' ', false, json::error_handler_t::replace);
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

json declined_json(const std::vector<LaneDecline>& declined) {
  json list = json::array();
  for (const LaneDecline& d : declined) list.push_back({{"lane", d.lane}, {"reason", d.reason}});
  return list;
}

json count_json(int64_t count) { return count < 0 ? json(nullptr) : json(count); }

json values_json(const CallMeasures& measures) {
  json values = json::object();
  for (const auto& [name, value] : measures.values) values[name] = value;
  return values;
}

std::string Receipt::text() const {
  json document = *document_;
  if (document["provenance"]["end_time"] == "") document["provenance"]["end_time"] = utc_now();
  const std::vector<std::string> violations = schema_violations(document);
  require(violations.empty(), ErrorKind::runtime, "receipt: {}",
          violations.empty() ? "" : violations.front());
  // Arguments and paths may hold any bytes; JSON may not.
  return document.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

Receipt Receipt::parse(const std::string& file, std::string_view text) {
  Receipt receipt;
  *receipt.document_ = parse_strict_json(file, text, max_depth);
  if (receipt.document_->contains("calls")) spell_out_empty((*receipt.document_)["calls"]);
  const std::vector<std::string> violations = schema_violations(*receipt.document_);
  require(violations.empty(), ErrorKind::invalid_data, "{}: {}", file,
          violations.empty() ? "" : quote(violations.front()));
  return receipt;
}

}  // namespace talea
