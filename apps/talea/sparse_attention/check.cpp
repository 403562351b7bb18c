// What: `talea check --operator sparse_attention`: every lane present against an independent fp64
//       oracle and eager arithmetic.
// Why: a user can prove the build on the machine it will run on, by the rule of the contract.
// Never: has a tolerance of its own; judge() of the yardsticks decides.
#include <map>
#include <nlohmann/json.hpp>

#include "../progress.hpp"
#include "../table.hpp"
#include "core/fail.hpp"
#include "io/receipt_file.hpp"
#include "shares.hpp"
#include "yardsticks/sparse_attention/judge.hpp"
#include "yardsticks/sparse_attention/run.hpp"

namespace talea::cli {
namespace {

namespace yard = yardsticks::sparse_attention;

struct Flags {
  std::string preset = "quick", lane, receipt;
  uint64_t seed = 1;
  int64_t only_case = -1;
  bool list = false;
};

// Every pair of values of every two options occurs; quick takes each fourth case.
std::vector<std::pair<size_t, yard::Spec>> cases_of(const Flags& f) {
  const std::vector<yard::Spec> all = yard::pairwise(f.seed);
  std::vector<std::pair<size_t, yard::Spec>> some;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool wanted = f.only_case >= 0     ? static_cast<int64_t>(i) == f.only_case
                        : f.preset == "full" ? true
                                             : i % 4 == 0;
    if (wanted) some.emplace_back(i, all[i]);
  }
  require(!some.empty(), ErrorKind::usage, "--case {}: there are {} cases", f.only_case,
          all.size());
  return some;
}

std::vector<std::string> lanes_of(const Flags& f) {
  if (!f.lane.empty()) return {f.lane};
  std::vector<std::string> host;
  for (const std::string& name : sa::lanes())
    if (name != "cuda" && name != "sm90") host.push_back(name);
  return host;
}

struct Tally {
  int64_t passed = 0, failed = 0, declined = 0;
};

void run(Context& context, const Flags& f) {
  const auto cases = cases_of(f);
  if (f.list) {
    for (const auto& [i, spec] : cases) fmt::print("{} {}\n", i, yard::describe(spec));
    return;
  }
  require_other_file("--receipt", f.receipt, {});
  const auto lanes = lanes_of(f);
  Receipt receipt(ReceiptKind::check, provenance_of(context));
  nlohmann::json entries = nlohmann::json::array();
  Table failures({"case", "lane", "what"});
  std::map<std::string, Tally> tallies;
  Progress progress(context, "check", static_cast<int64_t>(cases.size()), "cases");
  for (const auto& [i, spec] : cases) {
    check_interrupt();
    const yard::Case c = yard::make_case(spec);
    for (const std::string& lane : lanes) {
      Tally& tally = tallies[lane];
      nlohmann::json entry = {{"name", std::to_string(i)}, {"lane", lane}, {"passed", true}};
      std::string complaint;
      try {
        if (const std::string reason = yard::declines(c, lane); !reason.empty()) {
          ++tally.declined;
          entry["declined"] = reason;
        } else {
          const yard::Outcome ours = yard::run_lane(c, lane);
          complaint = ours.damage + yard::judge(c, ours);
          ++(complaint.empty() ? tally.passed : tally.failed);
        }
      } catch (const Error& e) {
        complaint = std::string("threw: ") + e.what();
        ++tally.failed;
      }
      if (!complaint.empty()) {
        entry["passed"] = false;
        entry["reproducer"] =
            fmt::format("talea check --operator sparse_attention --case {} --seed {} --lane {}", i,
                        f.seed, lane);
        failures.row({std::to_string(i), lane, complaint});
      }
      if (context.jsonl) fmt::print("{}\n", entry.dump());
      entries.push_back(std::move(entry));
    }
    progress.advance(1, std::to_string(i));
  }
  int64_t passed = 0, failed = 0;
  for (const auto& [lane, t] : tallies) passed += t.passed, failed += t.failed;
  receipt.title("Parity of every lane of sparse attention")
      .section("check", {{"preset", f.preset},
                         {"lanes", lanes},
                         {"passed", passed},
                         {"failed", failed},
                         {"seed", f.seed},
                         {"cases", entries}})
      .verdict(failed == 0 && passed > 0 ? Verdict::passed : Verdict::failed);
  context.exit_code = failed == 0 && passed > 0 ? 0 : static_cast<int>(ErrorKind::check_failed);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (context.machine()) return;
  if (failed > 0) failures.print();
  Table table({"lane", ">passed", ">failed", ">declined"});
  for (const auto& [lane, t] : tallies)
    table.row({lane, grouped(t.passed), grouped(t.failed), grouped(t.declined)});
  table.print();
  verdict(context.exit_code == 0, failed > 0 ? fmt::format("{} cases failed", failed)
                                  : passed == 0
                                      ? "nothing was compared"
                                      : fmt::format("{} cases, every one within the rule", passed));
}

}  // namespace

void register_check_sparse_attention(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(app, context,
                                 {"check", "parity of every lane present against fp64 truth",
                                  "talea check --operator sparse_attention --receipt check.json",
                                  ", all passed; 1 a case failed (one reproducer line each)"});
  sub->add_option("--preset", f->preset, "the matrix of cases")
      ->check(CLI::IsMember({"quick", "full"}))
      ->capture_default_str();
  sub->add_option("--case", f->only_case, "one case by number");
  sub->add_option("--seed", f->seed, "of cases and data")->capture_default_str();
  sub->add_option("--lane", f->lane, "one lane; default every host lane");
  add_isa(*sub);
  sub->add_flag("--list", f->list, "the cases");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, &context] { run(context, *f); });
}

}  // namespace talea::cli
