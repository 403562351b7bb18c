// What: the sections of what ran: a loss call, its errors, parity checks, provenance.
// Why: these describe correctness; sections_figures.cpp describes speed and training.
// Never: shows a number without its unit or its yardstick.
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/fail.hpp"
#include "report/charts.hpp"
#include "report/html.hpp"
#include "report/sections.hpp"

namespace talea::report {
namespace {

using json = nlohmann::json;

std::string card(const std::string& value_html, std::string_view label) {
  return fmt::format("<li><b>{}</b><span>{}</span></li>\n", value_html, escape(label));
}

// Where a call says which lane ran, and which declined.
const json& lane_facts(const json& call) {
  return call.contains("boundary") ? call["boundary"] : call["ran"];
}

std::string cost_cards(const json& call) {
  const json &cost = call["cost"], &ran = lane_facts(call);
  std::string html =
      card(inline_text(ran["lane"]), "lane that ran: " + ran["lane_kind"].get<std::string>());
  const json& declared = (cost.contains("workspace_bytes") ? cost : ran)["workspace_bytes"];
  html += card(human_bytes(declared.get<double>()), "workspace declared");
  if (cost["measured_peak_extra_bytes"].is_number())
    html += card(human_bytes(cost["measured_peak_extra_bytes"].get<double>()),
                 "peak extra memory, " + cost["measured_by"].get<std::string>());
  if (cost["time"].is_object())
    html += card(inline_text(cost["time"]["median_ms"]) + " ms",
                 "median of " + cost["time"]["n"].dump() + " runs");
  return html;
}

std::string attention_cards(const json& call) {
  const json& p = call["problem"];
  std::string html = "<ul class=\"cards\">\n" + card(inline_text(call["pass"]), "pass");
  html +=
      card(fmt::format("{} x {} of {}", p["queries"].dump(), p["slots"].dump(), p["keys"].dump()),
           "queries x slots of keys, " + p["kv_storage"].get<std::string>());
  if (call["slots"]["valid"].is_number())
    html += card(inline_text(call["slots"]["valid"]), "valid slots");
  if (call["slots"]["foreign"].is_number() && call["slots"]["foreign"] != 0)
    html += card(inline_text(call["slots"]["foreign"]), "foreign indices");
  if (call.contains("indexer") && call["pass"] == "index_loss")
    html += card(inline_text(call["indexer"]["loss"]), "index loss");
  html += cost_cards(call);
  html += card(call["scores"]["full_scores_bytes"] == 0 ? "never" : "yes",
               "full [queries, keys] scores existed");
  return html + "</ul>\n";
}

std::string scan_cards(const json& call) {
  const json &p = call["problem"], &ran = call["ran"];
  std::string html = "<ul class=\"cards\">\n" + card(inline_text(ran["pass"]), "pass");
  html +=
      card(fmt::format("{} x {} x {}", p["batch"].dump(), p["tokens"].dump(), p["heads"].dump()),
           "batch x tokens x heads");
  html += cost_cards(call);
  html += card(ran["quadratic_bytes"] == 0 ? "never" : "yes", "a [tokens, tokens] form existed");
  return html + "</ul>\n";
}

std::string call_cards(const json& call) {
  if (call["operator"] == "sparse_attention") return attention_cards(call);
  if (call["operator"] == "mamba3") return scan_cards(call);
  const json& p = call["problem"];
  std::string html = "<ul class=\"cards\">\n";
  for (const auto& item : call["values"].items())
    html += card(item.value().is_number() ? fmt::format("{:.8g}", item.value().get<double>())
                                          : inline_text(item.value()),
                 item.key());
  html +=
      card(fmt::format("{} x {} x {}", p["tokens"].dump(), p["hidden"].dump(), p["vocab"].dump()),
           "tokens x hidden x vocabulary, " + p["hidden_dtype"].get<std::string>());
  html += cost_cards(call);
  html += card(call["logits"]["full_tensor"] == true ? "yes" : "never",
               "full [tokens, vocabulary] tensor existed");
  return html + "</ul>\n";
}

std::string declined_table(const json& declined) {
  if (declined.empty()) return "";
  Table t;
  t.caption = "Lanes that declined, best first";
  t.head = {"lane", "reason"};
  for (const json& d : declined)
    t.rows.push_back({inline_text(d["lane"]), inline_text(d["reason"])});
  return table(t);
}

std::string details(std::string_view summary, const std::string& html) {
  return fmt::format("<details><summary>{}</summary>\n{}</details>\n", escape(summary), html);
}

std::string error_table(const json& errors) {
  Table t;
  t.caption =
      "Error against fp64 truth; eager is the yardstick: plain arithmetic in the same dtype";
  t.head = {"tensor", "lane",      "verdict",      "abs",       "rel",          "rel L2",
            "ulp",    "eager abs", "eager rel L2", "tolerance", "worst element"};
  t.numeric = {false, false, false, true, true, true, true, true, true, true, false};
  for (const json& e : errors) {
    const bool passed = e["passed"];
    std::vector<std::string> row = {inline_text(e["tensor"]), inline_text(e["lane"]),
                                    badge(passed, passed ? "passed" : "failed")};
    for (const char* field :
         {"abs", "rel", "rel_l2", "ulp", "eager_abs", "eager_rel_l2", "tolerance"})
      row.push_back(inline_text(e[field]));
    row.push_back(fmt::format("[{}]: {} for {}", inline_text(e["worst_index"]),
                              inline_text(e["ours"]), inline_text(e["truth"])));
    t.rows.push_back(row);
  }
  return table(t);
}

std::string error_chart(const char* title, const std::vector<Spot>& spots) {
  if (spots.empty()) return "";
  const ChartText text{title,
                       "Each mark is one tensor; below the line it lies closer to the truth than "
                       "eager arithmetic does. A cross is a failure.",
                       "largest eager error", "our largest error"};
  ScatterStyle style;
  style.log_x = style.log_y = style.diagonal = true;
  style.labels = spots.size() <= 12;
  return scatter_chart(text, spots, style);
}

}  // namespace

std::string loss_section(const json& document) {
  if (!document.contains("calls")) return "";
  std::string html;
  for (const json& call : document["calls"]) {
    html += "<h3>" + inline_text(call["operator"]) + "</h3>\n" + call_cards(call) +
            declined_table(lane_facts(call)["declined"]);
    json asked = {
        {"options", call["options"]}, {"problem", call["problem"]}, {"inputs", call["inputs"]}};
    if (call.contains("seed")) asked["seed"] = call["seed"];
    html += details("What was asked: problem, options, inputs", fact_table(asked));
    json ran = call;
    for (const char* shown : {"options", "problem", "inputs", "seed", "operator", "values"})
      ran.erase(shown);
    html += details("What ran, where it lived, what it cost", fact_table(ran));
  }
  return html;
}

std::string errors_section(const json& errors) {
  if (errors.empty()) return "";
  std::vector<Spot> spots;
  for (const json& e : errors)
    spots.push_back({number_or_nan(e, "eager_abs"), number_or_nan(e, "abs"),
                     text_or(e, "tensor") + ", " + text_or(e, "lane"), e["passed"] == true});
  return "<h3>Error</h3>\n" + error_chart("Our error against the eager yardstick's", spots) +
         error_table(errors);
}

namespace {

std::string failures(const json& cases) {
  std::string html;
  for (const json& c : cases) {
    if (c["passed"] == true) continue;
    html += "<h4>" + badge(false, "failed") + " " + inline_text(c["name"]) + ", lane " +
            inline_text(c["lane"]) + "</h4>\n";
    if (c.contains("reproducer")) html += "<pre>" + inline_text(c["reproducer"]) + "</pre>\n";
    if (c.contains("errors")) html += error_table(c["errors"]);
  }
  return html;
}

std::string matrix(const json& cases) {
  std::set<std::string> lanes;
  std::vector<std::string> names;  // in the order of the receipt
  std::map<std::string, std::map<std::string, const json*>> cells;
  for (const json& c : cases) {
    const std::string name = c["name"], lane = c["lane"];
    lanes.insert(lane);
    if (!cells.contains(name)) names.push_back(name);
    const json*& cell = cells[name][lane];
    if (!cell || (*cell)["passed"] == true) cell = &c;  // a failure is never hidden
  }
  Table t;
  t.caption = "Case by lane: a tick passed, a cross failed, a dash declined or was not run";
  t.head = {"case"};
  for (const std::string& lane : lanes) t.head.push_back(lane);
  for (const std::string& name : names) {
    std::vector<std::string> row = {escape(name)};
    for (const std::string& lane : lanes) {
      const auto found = cells[name].find(lane);
      if (found == cells[name].end()) {
        row.push_back("&ndash;");
        continue;
      }
      const json& c = *found->second;
      const std::string declined = text_or(c, "declined");
      row.push_back(!declined.empty()
                        ? "&ndash; <span class=\"quiet\">" + escape(declined) + "</span>"
                    : c["passed"] == true ? "<span class=\"badge good\">&#10003;</span>"
                                          : "<span class=\"badge bad\">&#10007;</span>");
    }
    t.rows.push_back(row);
  }
  return table(t);
}

std::string case_errors(const json& cases) {
  std::vector<Spot> spots;
  for (const json& c : cases)
    if (c.contains("errors"))
      for (const json& e : c["errors"])
        spots.push_back({number_or_nan(e, "eager_abs"), number_or_nan(e, "abs"),
                         text_or(c, "name") + ": " + text_or(e, "tensor"), e["passed"] == true});
  return error_chart("Our error against the eager yardstick's, all cases", spots);
}

}  // namespace

std::string check_section(const json& check) {
  const json& cases = check["cases"];
  std::string html = "<h3>Parity</h3>\n<ul class=\"cards\">\n";
  html += card(inline_text(check["preset"]), "preset");
  html += card(inline_text(check["passed"]), "passed");
  html += card(inline_text(check["failed"]), "failed");
  html += "</ul>\n" + failures(cases) + case_errors(cases);
  if (cases.size() <= 60) return html + matrix(cases);
  return html + details(fmt::format("All {} results", cases.size()), matrix(cases));
}

std::string provenance_section(const json& provenance) {
  return details("Provenance: version, build, machine, libraries, environment, command line",
                 fact_table(provenance));
}

}  // namespace talea::report
