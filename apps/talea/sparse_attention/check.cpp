// What: `talea check --operator sparse_attention`: every lane present against an independent fp64
//       oracle and eager arithmetic.
// Why: a user can prove the build on the machine it will run on, by the rule of the contract.
// Never: has a tolerance of its own; judge() of the yardsticks decides.
#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "../progress.hpp"
#include "../table.hpp"
#include "core/fail.hpp"
#include "io/receipt_file.hpp"
#include "sizes.hpp"
#include "yardsticks/sparse_attention/index_case.hpp"

namespace talea::cli {
namespace {

namespace yard = yardsticks::sparse_attention;

struct Flags {
  SparseSizes sizes{
      .tokens = 32, .keys = 256, .heads = 8, .dim = 128, .value_dim = 64, .top_k = 48};
  std::vector<CLI::Option*> size_options;
  std::string preset = "quick", lane, receipt;
  uint64_t seed = 1;
  int64_t only_case = -1;
  bool list = false;

  bool sized() const {
    return std::any_of(size_options.begin(), size_options.end(),
                       [](const CLI::Option* o) { return o->count() > 0; });
  }
};

// What a lane made of a case: it declined, or what was wrong (empty: nothing).
struct Judged {
  std::string declined, complaint;
};

// A case by name, what it is, and the flags that repeat it; `make` builds it for the lanes.
struct Named {
  std::string name, text, flags;
  std::function<std::function<Judged(const std::string&)>()> make;
};

Named attention_case(std::string name, std::string flags, const yard::Spec& spec) {
  return {std::move(name), yard::describe(spec), std::move(flags), [spec] {
            const auto c = std::make_shared<yard::Case>(yard::make_case(spec));
            return [c](const std::string& lane) -> Judged {
              if (std::string reason = yard::declines(*c, lane); !reason.empty())
                return {std::move(reason), ""};
              const yard::Outcome ours = yard::run_lane(*c, lane);
              return {"", ours.damage + yard::judge(*c, ours)};
            };
          }};
}

Named index_case(std::string name, std::string flags, const yard::IndexSpec& spec) {
  return {std::move(name), yard::describe(spec), std::move(flags), [spec] {
            const auto c = std::make_shared<yard::IndexCase>(yard::make_index_case(spec));
            return [c, loss = spec.loss](const std::string& lane) -> Judged {
              try {
                if (loss) {
                  const yard::LossOutcome ours = yard::run_loss(*c, lane);
                  return {"", ours.damage + yard::judge_loss(*c, ours)};
                }
                const yard::Selected ours = yard::run_select(*c, lane);
                return {"", ours.damage + yard::judge_selection(*c, ours)};
              } catch (const Error& e) {
                if (e.kind() == ErrorKind::unavailable) return {e.what(), ""};
                throw;
              }
            };
          }};
}

// One pass of the sizes that the flags give.
Named case_of_sizes(const Flags& f) {
  const SparseSizes& z = f.sizes;
  std::string flags = fmt::format("--pass {} --tokens {} --keys {} --top-k {} --dtype {} --seed {}",
                                  z.pass, z.tokens, z.keys, z.top_k, z.dtype, f.seed);
  const bool attends = z.pass == "forward" || z.pass == "backward";
  if (z.pass != "select") flags += fmt::format(" --heads {} --dim {}", z.heads, z.dim);
  if (attends) flags += fmt::format(" --value-dim {}", z.value_dim);
  if (!attends)
    flags += fmt::format(" --index-heads {} --index-dim {}", z.index_heads, z.index_dim);
  for (const auto& [flag, size] :
       {std::pair{"tokens", z.tokens}, std::pair{"keys", z.keys}, std::pair{"heads", z.heads},
        std::pair{"dim", z.dim}, std::pair{"top-k", z.top_k},
        std::pair{"index-heads", z.index_heads}, std::pair{"index-dim", z.index_dim}})
    require(size >= 1, ErrorKind::usage, "--{} 0: nothing to compare", flag);
  if (attends) {
    require(z.value_dim >= 1 && z.value_dim <= z.dim, ErrorKind::usage,
            "--value-dim {}: must lie in [1, {}], the columns of --dim", z.value_dim, z.dim);
    yard::Spec s;
    s.seed = f.seed, s.queries = z.tokens, s.keys = z.keys, s.heads = z.heads, s.dim = z.dim;
    s.value_dim = z.value_dim, s.slots = z.top_k, s.dtype = parse_dtype(z.dtype);
    s.sink = true, s.backward = s.d_lse = z.pass == "backward";
    return attention_case("sizes", flags, s);
  }
  yard::IndexSpec s;
  s.seed = f.seed, s.queries = z.tokens, s.keys = z.keys, s.heads = z.index_heads;
  s.dim = z.index_dim, s.top_k = z.top_k, s.dtype = s.attention_dtype = parse_dtype(z.dtype);
  s.causal = true, s.loss = z.pass == "index_loss";
  s.attention_heads = z.heads, s.attention_dim = z.dim;
  return index_case("sizes", flags, s);
}

// Every pair of values of every two options occurs; quick takes each fourth case.
std::vector<Named> cases_of(const Flags& f) {
  if (f.sized()) return {case_of_sizes(f)};
  const std::vector<yard::Spec> all = yard::pairwise(f.seed);
  std::vector<Named> some;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool wanted = f.only_case >= 0     ? static_cast<int64_t>(i) == f.only_case
                        : f.preset == "full" ? true
                                             : i % 4 == 0;
    if (wanted)
      some.push_back(
          attention_case(std::to_string(i), fmt::format("--case {} --seed {}", i, f.seed), all[i]));
  }
  require(!some.empty(), ErrorKind::usage, "--case {}: there are {} cases", f.only_case,
          all.size());
  return some;
}

std::vector<std::string> lanes_of(const Flags& f) {
  std::vector<std::string> host;
  bool known = f.lane.empty() || f.lane == "auto";
  for (const std::string& name : sa::lanes()) {
    known = known || name == f.lane;
    if (name != "cuda" && name != "sm90") host.push_back(name);
  }
  require(known, ErrorKind::usage, "--lane {}: no such lane", f.lane);
  if (f.lane.empty()) return host;
  require(f.lane != "cuda" && f.lane != "sm90", ErrorKind::unavailable,
          "--lane {}: a device lane; this checks host lanes", f.lane);
  return {f.lane};
}

struct Tally {
  int64_t passed = 0, failed = 0, declined = 0;
};

void run(Context& context, const Flags& f) {
  const auto cases = cases_of(f);
  if (f.list) {
    auto names = nlohmann::json::array();
    for (const Named& c : cases) names.push_back({{"name", c.name}, {"case", c.text}});
    if (context.machine()) return print_list(names, context.jsonl);
    for (const Named& c : cases) fmt::print("{} {}\n", c.name, c.text);
    return;
  }
  require_other_file("--receipt", f.receipt, {});
  const auto lanes = lanes_of(f);
  Receipt receipt(ReceiptKind::check, provenance_of(context));
  nlohmann::json entries = nlohmann::json::array();
  Table failures({"case", "lane", "what"});
  std::map<std::string, Tally> tallies;
  Progress progress(context, "check", static_cast<int64_t>(cases.size()), "cases");
  for (const Named& c : cases) {
    check_interrupt();
    const auto judge = c.make();
    for (const std::string& lane : lanes) {
      Tally& tally = tallies[lane];
      nlohmann::json entry = {{"name", c.name}, {"lane", lane}, {"passed", true}};
      std::string complaint;
      try {
        const Judged found = judge(lane);
        complaint = found.complaint;
        if (!found.declined.empty()) entry["declined"] = found.declined;
        ++(!found.declined.empty() ? tally.declined
           : complaint.empty()     ? tally.passed
                                   : tally.failed);
      } catch (const Error& e) {
        complaint = std::string("threw: ") + e.what();
        ++tally.failed;
      }
      if (!complaint.empty()) {
        entry["passed"] = false;
        entry["reproducer"] =
            fmt::format("talea check --operator sparse_attention {} --lane {}", c.flags, lane);
        failures.row({c.name, lane, complaint});
      }
      if (context.jsonl) fmt::print("{}\n", entry.dump());
      entries.push_back(std::move(entry));
    }
    progress.advance(1, c.name);
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
  f->sizes.add(*sub);
  sub->remove_option(sub->get_option("--workspace-limit"));
  sub->add_option("--dtype", f->sizes.dtype, "fp32, bf16, fp16 or fp64")->capture_default_str();
  for (const char* flag : {"--tokens", "--keys", "--heads", "--dim", "--value-dim", "--top-k",
                           "--index-heads", "--index-dim", "--pass", "--dtype"})
    f->size_options.push_back(sub->get_option(flag));
  CLI::Option* preset = sub->add_option("--preset", f->preset, "the matrix of cases")
                            ->check(CLI::IsMember({"quick", "full"}))
                            ->capture_default_str();
  CLI::Option* only = sub->add_option("--case", f->only_case, "one case by number");
  for (CLI::Option* option : f->size_options) option->excludes(preset)->excludes(only);
  sub->add_option("--seed", f->seed, "of cases and data")->capture_default_str();
  sub->add_option("--lane", f->lane, "one lane; default every host lane");
  add_isa(*sub);
  sub->add_flag("--list", f->list, "the cases");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, sub, &context] {
    f->sizes.note_unread_sizes(context, *sub);
    if (f->list) refuse_unread(*sub, {"--lane", "--isa", "--receipt"}, "--list runs none");
    if (f->only_case >= 0) refuse_unread(*sub, {"--preset"}, "--case names one case");
    blame_flags([&] { run(context, *f); });
  });
}

}  // namespace talea::cli
