// What: the page: head, summary of all receipts, then one section a receipt.
// Why: a reader sees the verdicts first and finds the evidence below.
// Never: includes a script; the page forbids itself the network.
#include "report/report.hpp"

#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "report/html.hpp"
#include "report/sections.hpp"
#include "report/style.hpp"

namespace talea::report {
namespace {

using json = nlohmann::json;

std::string verdict_badge(const json& d) {
  const std::string verdict = d["verdict"];
  if (verdict == "passed") return badge(true, "passed");
  if (verdict == "failed") return badge(false, "failed");
  return "<span class=\"badge none\">not checked</span>";
}

const char* explanation_of(const std::string& kind) {
  if (kind == "loss") return "One call of the operator: what was asked, what ran, what came out.";
  if (kind == "check")
    return "Parity: each lane's results against fp64 truth, and beside plain same-precision "
           "arithmetic.";
  if (kind == "bench") return "Speed and memory of lanes, measured side by side in one process.";
  if (kind == "train")
    return "Training with the candidate and the reference loss side by side, judged by gates.";
  return "Known bugs of the field: shown broken first, then ours right.";
}

std::string title_of(const json& d) {
  return d.contains("title") ? d["title"].get<std::string>() : d["kind"].get<std::string>();
}

std::string revision_of(const json& d) {
  const json& p = d["provenance"];
  std::string revision = p["git_revision"].get<std::string>().substr(0, 12);
  if (p["git_dirty"] == true) revision += " + local changes";
  return p["version"].get<std::string>() + " (" + revision + ")";
}

std::string machine_of(const json& d) {
  const json& p = d["provenance"];
  if (p["device"].is_object()) return p["device"]["name"];
  return p["host"]["cpu"].get<std::string>() + ", " + p["host"]["isa"].get<std::string>();
}

std::string summary(const std::vector<NamedReceipt>& receipts) {
  Table t;
  t.caption = "Receipts on this page";
  t.head = {"receipt", "kind", "verdict", "finished", "version", "machine"};
  for (size_t i = 0; i < receipts.size(); ++i) {
    const json& d = receipts[i].receipt.document();
    t.rows.push_back({fmt::format("<a href=\"#r{}\">{}</a>", i + 1, escape(receipts[i].file)),
                      escape(d["kind"].get<std::string>()), verdict_badge(d),
                      escape(d["provenance"]["end_time"].get<std::string>()),
                      escape(revision_of(d)), escape(machine_of(d))});
  }
  return table(t);
}

std::string notes_section(const json& d) {
  if (!d.contains("notes") || d["notes"].empty()) return "";
  std::string html = "<h3>Notes</h3>\n<ul>";
  for (const json& note : d["notes"]) html += "<li>" + inline_text(note) + "</li>";
  return html + "</ul>\n";
}

std::string one_receipt(const NamedReceipt& named, size_t number) {
  const json& d = named.receipt.document();
  std::string html = fmt::format(
      "<section id=\"r{}\">\n<h2>{} {}</h2>\n<p>{} <span class=\"quiet\">From "
      "<code>{}</code>.</span></p>\n",
      number, escape(title_of(d)), verdict_badge(d), explanation_of(d["kind"]), escape(named.file));
  if (d["kind"] == "loss") html += loss_section(d);
  if (d.contains("errors")) html += errors_section(d["errors"]);
  if (d.contains("train")) html += train_section(d["train"]);
  html += gates_section(d);
  if (d.contains("check")) html += check_section(d["check"]);
  if (d.contains("bench")) html += bench_section(d["bench"]);
  if (d.contains("repro")) html += repro_section(d["repro"]);
  html += notes_section(d);
  if (d["kind"] != "loss") html += loss_section(d);  // the calls behind what is shown above
  return html + provenance_section(d["provenance"]) + "</section>\n";
}

}  // namespace

std::string render_html(const std::vector<NamedReceipt>& receipts) {
  require(!receipts.empty(), ErrorKind::usage, "report: no receipts");
  std::string html =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'\">\n<title>Talea report</title>\n<style>" +
      std::string(style_sheet) + "</style>\n</head>\n<body>\n<main>\n";
  html +=
      "<h1>Talea report</h1>\n<p>Talea computes the end of a language model, output projection and "
      "cross-entropy together, and writes a receipt of each run: what was asked, what ran, at what "
      "cost and with what error. This page shows such receipts; it needs no network.</p>\n";
  html += summary(receipts);
  for (size_t i = 0; i < receipts.size(); ++i) html += one_receipt(receipts[i], i + 1);
  return html + "</main>\n</body>\n</html>\n";
}

}  // namespace talea::report
