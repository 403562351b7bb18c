// What: the page escapes all it shows, shows every section, and compare finds what got worse.
// Why: a receipt is untrusted input, and a lost verdict must not pass as a difference.
// Never: checks the looks; tests/report/sample.hpp makes receipts to look at.
#include "report/report.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <tuple>

#include "report/axis.hpp"
#include "report/charts.hpp"
#include "report/html.hpp"
#include "report/sample.hpp"
#include "support/expect_error.hpp"

namespace talea::report {
namespace {

using json = nlohmann::json;
using testing::expect_error;
using testing::sample_receipts;

size_t count_of(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// As a reader gets it: written and parsed again.
Receipt reread(const json& document) { return Receipt::parse("r.json", document.dump()); }

TEST(Report, ShowsEveryKind) {
  const std::string html = render_html(sample_receipts());
  for (const char* part :
       {"loss.json", "check.json", "bench.json", "train.json", "repro.json", "Time against extra",
        "Lanes that declined", "Parity", "Curves", "Planted bugs against", "Sentinels",
        "FIX_VALIDATED", "Provenance", "fp64 truth", "prefers-color-scheme: dark", "@media print"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
  EXPECT_EQ(count_of(html, "<svg"), count_of(html, "</svg>"));
  EXPECT_EQ(count_of(html, "<table"), count_of(html, "</table>"));
  EXPECT_EQ(count_of(html, "<details"), count_of(html, "</details>"));
}

TEST(Report, NeedsNoNetworkAndNoScript) {
  const std::string html = render_html(sample_receipts());
  for (const char* part :
       {"http://", "https://", "<script", "url(", "@import", "<link", "<img", " src="})
    EXPECT_EQ(html.find(part), std::string::npos) << part;
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
}

// Every string of the document, keys of open objects too, becomes an attack.
void poison(json& value, const std::string& attack) {
  if (value.is_string() && value != "NaN") {
    value = attack;
  } else if (value.is_structured()) {
    for (json& child : value) poison(child, attack);
  }
}

TEST(Report, EscapesEveryStringOfAReceipt) {
  const std::string attack = "<script>alert('1')</script>\"'><img src=x onerror=alert(2)>&\x1b";
  for (NamedReceipt named : sample_receipts()) {
    json document = json::parse(named.receipt.text());
    json poisoned = document;
    poison(poisoned, attack);
    // Enumerated members must stay themselves or the schema refuses the receipt.
    const json flat = document.flatten();
    for (const auto& item : flat.items()) {
      const json::json_pointer at(item.key());
      json one = document;
      if (!item.value().is_string()) continue;
      one[at] = poisoned[at];
      if (!schema_violations(one).empty()) poisoned[at] = item.value();
    }
    for (const char* open : {"libraries", "environment"})
      poisoned["provenance"][open][attack] = attack;
    if (poisoned.contains("calls")) poisoned["calls"][0]["values"][attack] = 1;
    if (poisoned.contains("repro"))
      poisoned["repro"]["bugs"][0][attack] = {{attack, {attack, {{attack, 1}}}}};
    if (poisoned.contains("train")) poisoned["train"][attack] = attack;
    const std::string html = render_html({{attack, reread(poisoned)}});
    EXPECT_EQ(html.find("<script"), std::string::npos) << named.file;
    EXPECT_EQ(html.find("<img"), std::string::npos) << named.file;
    EXPECT_EQ(html.find("'><"), std::string::npos) << named.file;
    EXPECT_EQ(html.find('\x1b'), std::string::npos) << named.file;
    EXPECT_GT(count_of(html, "&lt;script&gt;"), 10u) << named.file;
  }
}

TEST(Report, EscapeCoversTheFiveCharacters) {
  EXPECT_EQ(escape("<a b=\"c\" d='e'>&"), "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;");
  EXPECT_EQ(escape("\xc3\xa4\n"), "\xc3\xa4\n");
  EXPECT_EQ(escape(std::string_view("\0\x7f", 2)), "\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(Report, ChartsSurviveExtremeValues) {
  const double inf = INFINITY, nan = NAN;
  for (const std::vector<double>& ys : std::vector<std::vector<double>>{{},
                                                                        {nan},
                                                                        {inf, -inf},
                                                                        {0},
                                                                        {0, 0},
                                                                        {1e308, -1e308},
                                                                        {5e-324, 1e-300},
                                                                        {-1},
                                                                        {1, nan, 2}}) {
    Series s{"s", {}};
    std::vector<Spot> spots;
    std::vector<Bar> bars;
    for (size_t i = 0; i < ys.size(); ++i) {
      s.points.emplace_back(static_cast<double>(i), ys[i]);
      spots.push_back({ys[i], ys[i], "x", false});
      bars.push_back({"x", ys[i], ys[i], ys[i], ""});
    }
    const ScatterStyle log{true, true, true, true, true};
    for (const std::string& svg :
         {line_chart({"t", "d", "x", "y"}, {s}), scatter_chart({"t", "d", "x", "y"}, spots, log),
          scatter_chart({"t", "d", "x", "y"}, spots, {}), bar_chart({"t", "d", "x", "y"}, bars)}) {
      EXPECT_EQ(svg.find("nan"), std::string::npos) << svg;
      EXPECT_EQ(svg.find("\"inf"), std::string::npos) << svg;
      EXPECT_EQ(svg.find("-inf"), std::string::npos) << svg;
    }
  }
  EXPECT_NE(line_chart({"t", "d", "x", "y"}, {{"s", {{0, 1}, {1, nan}, {2, 3}}}})
                .find("1 values are not finite"),
            std::string::npos);
}

TEST(Report, TicksAreFewRoundAndInside) {
  for (const auto& [low, high] : std::vector<std::pair<double, double>>{
           {0, 1}, {-3, 7}, {2.31, 2.32}, {1e-9, 1e9}, {5, 5}, {-1e300, 1e300}})
    for (const bool log : {false, true}) {
      const Axis axis({low, high}, log, 0, 100);
      const std::vector<double> ticks = axis.ticks();
      EXPECT_LE(ticks.size(), 12u);
      for (const double tick : ticks) {
        EXPECT_GE(axis.place(tick), -1e-6);
        EXPECT_LE(axis.place(tick), 100 + 1e-6);
      }
    }
}

TEST(Report, AnEmptyPageIsAnError) {
  expect_error(ErrorKind::usage, {"no receipts"}, [] { render_html({}); });
}

TEST(CompareReceipts, AReceiptAgainstItselfIsNoDifference) {
  for (const NamedReceipt& named : sample_receipts()) {
    const Comparison c = compare(named.receipt, named.receipt);
    EXPECT_TRUE(c.differences.empty());
    EXPECT_TRUE(c.worse.empty());
  }
}

// b = sample `kind` with one member changed.
Comparison compare_changed(const std::string& kind, const char* pointer, json value) {
  for (const NamedReceipt& named : sample_receipts()) {
    if (named.file != kind + ".json") continue;
    json document = json::parse(named.receipt.text());
    const Receipt a = reread(document);
    document[json::json_pointer(pointer)] = std::move(value);
    return compare(a, reread(document));
  }
  throw std::logic_error("no such sample");
}

TEST(CompareReceipts, FiguresThatDifferAreNotWorse) {
  const Comparison c = compare_changed("bench", "/bench/runs/0/ratio", 9.5);
  ASSERT_EQ(c.differences.size(), 1u);
  EXPECT_EQ(c.differences[0].field, "/bench/runs/0/ratio");
  EXPECT_EQ(c.differences[0].b, "9.5");
  EXPECT_TRUE(c.worse.empty());
}

TEST(CompareReceipts, EveryLostVerdictIsWorse) {
  const std::tuple<const char*, const char*, json, const char*> lost[] = {
      {"loss", "/verdict", "failed", "verdict"},
      {"loss", "/verdict", "not_checked", "verdict"},
      {"loss", "/errors/0/passed", false, "error of cpu dx"},
      {"loss", "/calls/0/values/loss", "NaN", "value loss"},
      {"check", "/check/cases/0/passed", false, "case"},
      {"train", "/gates/0/passed", false, "gate"},
      {"train", "/mutants/0/killed", false, "mutant"},
      {"train", "/sentinels/0/passed", false, "sentinel"},
      {"train", "/gates", json::array(), "absent"},
      {"train", "/mutants", json::array(), "absent"},
      {"repro", "/repro/bugs/0/passed", false, "bug"},
      {"repro", "/repro/bugs", json::array(), "absent"},
  };
  for (const auto& [kind, pointer, value, word] : lost) {
    const Comparison c = compare_changed(kind, pointer, value);
    ASSERT_FALSE(c.worse.empty()) << kind << pointer;
    EXPECT_NE(c.worse[0].find(word), std::string::npos) << c.worse[0];
    EXPECT_FALSE(c.differences.empty());
  }
}

TEST(CompareReceipts, AGainIsNotWorse) {
  const auto samples = sample_receipts();
  json worse = json::parse(samples[0].receipt.text());
  worse["verdict"] = "failed";
  worse["errors"][0]["passed"] = false;
  const Comparison c = compare(reread(worse), samples[0].receipt);
  EXPECT_FALSE(c.differences.empty());
  EXPECT_TRUE(c.worse.empty());
}

}  // namespace
}  // namespace talea::report
