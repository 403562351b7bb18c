// What: the sections with figures: benchmarks, training, gates and planted bugs, reproducers.
// Why: time and memory are a trade; a chart of both says more than two columns.
// Never: compares runs of different cases in one chart.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "report/charts.hpp"
#include "report/html.hpp"
#include "report/sections.hpp"

namespace talea::report {
namespace {

using json = nlohmann::json;

std::string ratio_text(const json& run) {
  return run.contains("ratio") ? short_number(number_or_nan(run, "ratio")) + " x" : "";
}

std::string bench_case(const std::string& name, const std::vector<const json*>& runs,
                       const std::string& limit) {
  std::vector<Bar> bars;
  std::vector<Spot> spots;
  Table t;
  t.head = {"run", "lane", "median ms", "p20", "p80", "n", "ratio", "extra memory"};
  t.numeric = {false, false, true, true, true, true, true, true};
  for (const json* r : runs) {
    const json& time = (*r)["time"];
    const double median = number_or_nan(time, "median_ms");
    const std::string label = text_or(*r, "name");
    bars.push_back({label, median, number_or_nan(time, "p20_ms"), number_or_nan(time, "p80_ms"),
                    short_number(median) + " ms  " + ratio_text(*r)});
    std::string memory = "&ndash;";
    if (r->contains("extra_bytes")) {
      const double bytes = (*r)["extra_bytes"].get<double>();
      memory = human_bytes(bytes);
      spots.push_back({bytes / 1048576.0, median, label, r->value("passed", true)});
    }
    t.rows.push_back({inline_text((*r)["name"]), escape(text_or(*r, "lane")), short_number(median),
                      inline_text(time["p20_ms"]), inline_text(time["p80_ms"]),
                      inline_text(time["n"]), escape(ratio_text(*r)), memory});
  }
  std::string html = "<h3>" + escape(name) + "</h3>\n";
  html += bar_chart({"Time",
                     "Median, with a line from the 20th to the 80th percentile; 1 x is " + limit +
                         ". Shorter is better.",
                     "", ""},
                    bars);
  if (spots.size() > 1) {
    ScatterStyle style;
    style.frontier = true;
    // Memory spans decades; a run that needs none has no place on a logarithmic axis.
    style.log_x = std::all_of(spots.begin(), spots.end(), [](const Spot& s) { return s.x > 0; });
    html += scatter_chart({"Time against extra memory",
                           "Down and to the left is better; the dashed line joins the runs that no "
                           "other run beats in both.",
                           "extra memory, MiB", "median ms"},
                          spots, style);
  }
  return html + table(t);
}

}  // namespace

std::string bench_section(const json& bench) {
  std::vector<std::pair<std::string, std::vector<const json*>>> cases;
  for (const json& r : bench["runs"]) {
    const std::string name = r["case"];
    auto at = std::find_if(cases.begin(), cases.end(), [&](auto& c) { return c.first == name; });
    if (at == cases.end()) at = cases.insert(cases.end(), {name, {}});
    at->second.push_back(&r);
  }
  std::string html;
  for (const auto& [name, runs] : cases) html += bench_case(name, runs, text_or(bench, "limit"));
  return html;
}

namespace {

Series series_of(const json& curve) {
  Series s;
  s.name = curve["name"];
  const size_t count = std::min(curve["steps"].size(), curve["values"].size());
  for (size_t i = 0; i < count; ++i)
    s.points.emplace_back(curve["steps"][i].get<double>(), number_of(curve["values"][i]));
  return s;
}

// The curves that `wanted` names, in its order, or all of them.
std::string curve_chart(const json& curves, const json& wanted, const ChartText& text, bool log_y) {
  std::vector<Series> series;
  ChartText shown = text;
  auto take = [&](const json& curve) {
    series.push_back(series_of(curve));
    if (series.size() == 1) shown.y_label = text_or(curve, "y_label", "loss");
  };
  if (!wanted.is_array())
    for (const json& c : curves) take(c);
  else
    for (const json& name : wanted)
      for (const json& c : curves)
        if (c["name"] == name) take(c);
  return series.empty() ? "" : line_chart(shown, series, log_y);
}

}  // namespace

std::string train_section(const json& train) {
  const json& curves = train["curves"];
  std::string html = "<h3>Training</h3>\n";
  if (train.contains("charts") && train["charts"].is_array()) {
    for (const json& chart : train["charts"]) {
      if (!chart.is_object() || !chart.contains("curves")) continue;
      html += curve_chart(curves, chart["curves"],
                          {text_or(chart, "title"), text_or(chart, "text"), "step", ""},
                          chart.contains("log_y") && chart["log_y"] == true);
    }
  } else {
    html += curve_chart(
        curves, nullptr,
        {"Curves", "One line a run; where they lie on each other, the runs agree.", "step", ""},
        false);
  }
  json rest = train;
  rest.erase("curves");
  rest.erase("charts");
  if (!rest.empty())
    html += "<details><summary>All further facts of the run</summary>\n" + fact_table(rest) +
            "</details>\n";
  return html;
}

namespace {

std::string passed_badge(bool passed) { return badge(passed, passed ? "passed" : "failed"); }

std::string gate_table(const json& gates) {
  Table t;
  t.caption = "Gates: what must hold for the run to count";
  t.head = {"gate", "verdict", "value", "limit", "what it asks"};
  t.numeric = {false, false, true, true, false};
  for (const json& g : gates) {
    const auto number = [&](const char* field) {
      return g.contains(field) ? inline_text(g[field]) : "";
    };
    t.rows.push_back({inline_text(g["name"]), passed_badge(g["passed"]), number("value"),
                      number("limit"), escape(text_or(g, "text"))});
  }
  return table(t);
}

// One row a planted bug, one column a gate or test that caught any of them.
std::string mutant_table(const json& mutants) {
  std::vector<std::string> columns;
  for (const json& m : mutants)
    for (const json& by : m["killed_by"])
      if (const auto name = by.get<std::string>();
          std::find(columns.begin(), columns.end(), name) == columns.end())
        columns.push_back(name);
  const bool wide = columns.size() > 12;  // then the names are listed instead
  Table t;
  const auto killed = std::count_if(mutants.begin(), mutants.end(),
                                    [](const json& m) { return m["killed"] == true; });
  t.caption = fmt::format("Planted bugs against what catches them: {} of {} caught", killed,
                          mutants.size());
  t.head = {"planted bug", "verdict"};
  if (wide) {
    t.head.push_back("caught by");
  } else {
    t.head.insert(t.head.end(), columns.begin(), columns.end());
  }
  for (const json& m : mutants) {
    const std::string what = text_or(m, "text");
    std::vector<std::string> row = {
        inline_text(m["name"]) +
            (what.empty() ? "" : "<br><span class=\"quiet\">" + escape(what) + "</span>"),
        badge(m["killed"], m["killed"] == true ? "caught" : "missed")};
    if (wide) row.push_back(inline_text(m["killed_by"]));
    const json& by = m["killed_by"];
    for (size_t i = 0; !wide && i < columns.size(); ++i)
      row.push_back(std::find(by.begin(), by.end(), columns[i]) != by.end() ? "&#10003;" : "");
    t.rows.push_back(row);
  }
  return table(t);
}

std::string sentinel_table(const json& sentinels) {
  Table t;
  t.caption = "Sentinels: broken on purpose; each must be noticed";
  t.head = {"sentinel", "verdict", "what it shows"};
  for (const json& s : sentinels)
    t.rows.push_back(
        {inline_text(s["name"]), passed_badge(s["passed"]), escape(text_or(s, "text"))});
  return table(t);
}

}  // namespace

std::string gates_section(const json& document) {
  const auto has = [&](const char* name) {
    return document.contains(name) && !document[name].empty();
  };
  std::string html;
  if (has("gates")) html += gate_table(document["gates"]);
  if (has("mutants")) html += mutant_table(document["mutants"]);
  if (has("sentinels")) html += sentinel_table(document["sentinels"]);
  return html.empty() ? "" : "<h3>Gates</h3>\n" + html;
}

std::string repro_section(const json& repro) {
  std::string html = "<h3>Known bugs</h3>\n";
  for (const json& bug : repro["bugs"]) {
    html += "<h4>" + inline_text(bug["id"]) + ": " + inline_text(bug["title"]) + " " +
            passed_badge(bug["passed"]) + "</h4>\n<p>";
    for (const json& marker : bug["markers"])
      html += "<span class=\"badge none\">" + inline_text(marker) + "</span> ";
    html += "</p>\n";
    json rest = bug;
    for (const char* shown : {"id", "title", "passed", "markers"}) rest.erase(shown);
    if (!rest.empty()) html += fact_table(rest);
  }
  return html;
}

}  // namespace talea::report
