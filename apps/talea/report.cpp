// What: `talea report` and `talea compare`: receipts to a page, two receipts against each other.
// Why: figures are read by people, and a verdict that got worse is found by a machine.
// Never: trusts a receipt: what the schema rejects ends with exit code 5.
#include "report/report.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "context.hpp"
#include "core/fail.hpp"
#include "io/atomic_file.hpp"
#include "io/receipt_file.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

void run_report(Context& context, const std::vector<std::string>& files, const std::string& out) {
  require_other_file("--out", out, files);
  std::vector<report::NamedReceipt> receipts;
  for (const std::string& file : files) receipts.push_back({file, io::read_receipt(file)});
  const std::string page = report::render_html(receipts);
  io::write_file_atomically(out, page);
  if (context.machine()) {
    fmt::print("{}\n",
               nlohmann::json{{"receipts", files}, {"out", out}, {"bytes", page.size()}}.dump());
    return;
  }
  Facts facts;
  facts.add("receipts", std::to_string(files.size()));
  facts.add("page", fmt::format("{} ({})", out, human_bytes(static_cast<int64_t>(page.size()))));
  facts.print();
}

void run_compare(Context& context, const std::string& a, const std::string& b) {
  const auto found = report::compare(io::read_receipt(a), io::read_receipt(b));
  context.exit_code = found.worse.empty() ? 0 : static_cast<int>(ErrorKind::check_failed);
  if (context.machine()) {
    nlohmann::ordered_json j;
    j["a"] = a;
    j["b"] = b;
    j["worse"] = found.worse;
    j["differences"] = nlohmann::json::array();
    for (const auto& d : found.differences)
      j["differences"].push_back({{"field", d.field}, {"a", d.a}, {"b", d.b}});
    fmt::print("{}\n", j.dump(context.jsonl ? -1 : 2));
    return;
  }
  Table table({"field", a, b});
  for (const auto& d : found.differences) table.row({d.field, d.a, d.b});
  if (!found.differences.empty()) table.print();
  for (const std::string& w : found.worse) fmt::print("worse: {}\n", w);
  verdict(found.worse.empty(),
          found.worse.empty() ? fmt::format("no worse; {} fields differ", found.differences.size())
                              : fmt::format("{} verdicts got worse", found.worse.size()));
}

}  // namespace

void register_report(CLI::App& app, Context& context) {
  struct Flags {
    std::vector<std::string> files;
    std::string out = "report.html";
  };
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(app, context,
                                 {"report", "receipts to one offline HTML page",
                                  "talea report check.json --out report.html", ""});
  sub->add_option("receipts", f->files, "receipts (JSON)")->required();
  sub->add_option("-o,--out", f->out, "the page")->capture_default_str();
  sub->callback([f, &context] { run_report(context, f->files, f->out); });
}

void register_compare(CLI::App& app, Context& context) {
  auto files = std::make_shared<std::pair<std::string, std::string>>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"compare", "two receipts against each other", "talea compare before.json after.json",
       ", B no worse than A; 1 B's verdict got worse"});
  sub->add_option("A", files->first, "the receipt before")->required();
  sub->add_option("B", files->second, "the receipt after")->required();
  sub->callback([files, &context] { run_compare(context, files->first, files->second); });
}

}  // namespace talea::cli
