// What: `talea repro`: known bugs of the field, each shown broken and then right.
// Why: who arrives with one of them finds out which with one command.
// Never: prints a sentinel that its figure did not earn.
#include "repro/support/repro.hpp"

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "context.hpp"
#include "core/device_session.hpp"
#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "io/receipt_file.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

struct Flags {
  std::string name = "list", receipt;
  std::string device = "cpu";
  bool all = false, without_fix = false;
};

// The device of `--device cuda`, for the run; null on the CPU.
std::unique_ptr<DeviceSession> open_device(const std::string& name) {
  require(name == "cpu" || name == "cuda", ErrorKind::usage, "--device {}: cpu or cuda", name);
  if (name == "cpu") return nullptr;
  std::string why;
  auto session = DeviceSession::open(0, why);
  require(session != nullptr, ErrorKind::unavailable, "--device cuda: {}", why);
  return session;
}

struct Ran {
  const repro::Reproducer* which;
  repro::Report report;
  double seconds;
};

void list(const Context& context) {
  if (context.machine()) {
    auto names = nlohmann::json::array();
    for (const auto& r : repro::all())
      names.push_back({{"name", r.name}, {"museum", r.museum}, {"summary", r.summary}});
    return print_list(names, context.jsonl);
  }
  Table table({"reproducer", "museum", "what it shows"});
  for (const auto& r : repro::all()) table.row({r.name, r.museum, r.summary});
  table.print();
}

nlohmann::json to_json(const Ran& ran) {
  std::vector<std::string> markers;
  auto findings = nlohmann::json::array();
  for (const auto& f : ran.report.findings()) {
    if (f.sentinel != "figure" && !f.sentinel.empty()) markers.push_back(f.sentinel);
    auto number = [](double v) {
      return std::isfinite(v) ? nlohmann::json(v) : nlohmann::json(fmt::format("{}", v));
    };
    findings.push_back({{"sentinel", f.sentinel},
                        {"what", f.what},
                        {"measured", number(f.measured)},
                        {"bound", number(f.bound)}});
  }
  return {{"id", ran.which->name},       {"title", ran.which->summary},
          {"museum", ran.which->museum}, {"markers", markers},
          {"findings", findings},        {"passed", ran.report.complete()}};
}

// With --json: the reproducer that was named, or what ran of all of them.
void print_document(const std::vector<Ran>& ran, bool all) {
  if (!all) return fmt::print("{}\n", to_json(ran.front()).dump());
  auto list = nlohmann::json::array();
  for (const Ran& one : ran) list.push_back(to_json(one));
  print_list(list, false);
}

void print(const Ran& ran) {
  heading(fmt::format("{} ({}): {}", ran.which->name, ran.which->museum, ran.which->summary));
  if (repro::device_in_use() && ran.which->on_host)
    fmt::print("On the host: {}.\n", ran.which->on_host);
  Table table({"sentinel", "what was measured", ">figure", ">bound"});
  for (const auto& f : ran.report.findings())
    table.row({f.sentinel == "figure" ? ""
               : f.sentinel.empty()   ? "NOT SHOWN"
                                      : f.sentinel,
               f.what, fmt::format("{:.3g}", f.measured),
               f.sentinel == "figure" ? "" : fmt::format("{:.3g}", f.bound)});
  table.print();
}

void write(const Context& context, const std::string& path, const std::string& device,
           const std::vector<Ran>& ran, bool passed) {
  Receipt receipt(ReceiptKind::repro, provenance_of(context));
  auto bugs = nlohmann::json::array(), sentinels = nlohmann::json::array();
  for (const Ran& r : ran) {
    bugs.push_back(to_json(r));
    for (const auto& f : r.report.findings())
      if (f.sentinel != "figure")
        sentinels.push_back(
            {{"name", f.sentinel.empty() ? "NOT_SHOWN" : f.sentinel},
             {"passed", !f.sentinel.empty()},
             {"text", fmt::format("{}: {} = {:.3g}", r.which->name, f.what, f.measured)}});
  }
  receipt.section("repro", {{"device", device}, {"bugs", bugs}}).section("sentinels", sentinels);
  receipt.title(fmt::format("Known failures, broken and right ({})", device));
  receipt.verdict(passed ? Verdict::passed : Verdict::failed);
  io::write_receipt(path, receipt);
}

void run(Context& context, const Flags& f) {
  require_other_file("--receipt", f.receipt, {});
  if (f.name == "list" && !f.all) return list(context);
  require(f.name == "list" || !f.all, ErrorKind::usage, "repro {} --all: one of the two", f.name);
  const auto device = open_device(f.device);
  repro::run_on(device.get());
  std::vector<Ran> ran;
  bool passed = true, known = f.all;
  for (const auto& r : repro::all()) {
    if (!f.all && f.name != r.name) continue;
    known = true;
    try {
      check_interrupt();
    } catch (const Interrupted&) {
      if (context.json && f.all) print_document(ran, true);
      throw;
    }
    const auto begin = std::chrono::steady_clock::now();
    ran.push_back({&r, repro::Report(f.without_fix), 0});
    r.run(ran.back().report);
    ran.back().seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    passed = passed && ran.back().report.complete();
    if (context.jsonl)
      fmt::print("{}\n", to_json(ran.back()).dump());
    else if (!context.json)
      print(ran.back());
  }
  repro::run_on(nullptr);
  require(known, ErrorKind::usage, "repro {}: no such reproducer; `talea repro list` names them",
          f.name);
  if (context.json) print_document(ran, f.all);
  if (!f.receipt.empty()) write(context, f.receipt, f.device, ran, passed);
  if (!passed) context.exit_code = static_cast<int>(ErrorKind::check_failed);
  if (!context.machine())
    verdict(passed, passed
                        ? fmt::format("{} reproducers: every bug shown, every fix held", ran.size())
                        : "a sentinel was not earned");
}

}  // namespace

void register_repro(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(app, context,
                                 {"repro", "known bugs of the field, shown broken and right",
                                  "talea repro none_backward", "; 1 a sentinel was not earned"});
  sub->add_option("name", f->name, "a reproducer, or list")->capture_default_str();
  sub->add_flag("--all", f->all, "run every one");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->add_option("--device", f->device, "where our path runs: cpu, or cuda (device 0)")
      ->capture_default_str();
  sub->add_flag("--without-fix", f->without_fix, "for tests: our path runs the broken one");
  sub->callback([f, sub, &context] {
    if (f->name == "list" && !f->all) refuse_others(*sub, {"name"}, "list runs no reproducer");
    run(context, *f);
  });
}

}  // namespace talea::cli
