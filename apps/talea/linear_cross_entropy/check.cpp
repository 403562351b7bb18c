// What: `talea check`: every lane present against the long-double oracle and eager arithmetic.
// Why: a user can prove the build on the machine it will run on, by the rule of the contract.
// Never: has a tolerance of its own; judge() of the yardsticks decides.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cases.hpp"
#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "io/receipt_file.hpp"
#include "progress.hpp"
#include "rank_check.hpp"
#include "record.hpp"
#include "shards.hpp"
#include "table.hpp"
#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"
#include "yardsticks/place.hpp"

namespace talea::cli {
namespace {

using testing::Real;

struct Flags {
  std::string preset = "quick", only_case, lane, results_from, receipt;
  uint64_t seed = 1;
  bool list = false;
  ShardFlags ranks;
};

struct Outcome {
  std::string name, lane, declined, complaint, reproducer;
  double dw_rel_l2 = 0;
  bool passed() const { return complaint.empty(); }
};

struct Subject {
  std::string lane;
  testing::Place* place;
};

struct Truth {
  const char* name;
  const testing::Array* ours;
  const std::vector<Real>*truth, *eager;
};

// The figures of one tensor: information beside the verdict, which judge() gives.
ErrorFigure figure(const Truth& t, const std::string& lane, bool passed) {
  ErrorFigure f;
  f.tensor = t.name;
  f.lane = lane;
  f.passed = passed;
  const auto& shape = t.ours->shape();
  const int64_t columns = shape.size() > 1 ? shape[1] : 1;
  double largest = 0, worst = -1, eager_square = 0, square = 0;
  for (int64_t i = 0; i < t.ours->elements(); ++i) {
    const double truth = static_cast<double>((*t.truth)[static_cast<size_t>(i)]);
    const double ours = static_cast<double>(t.ours->get(i / columns, i % columns));
    const double eager = static_cast<double>((*t.eager)[static_cast<size_t>(i)]);
    if (!std::isfinite(truth) || !std::isfinite(eager)) continue;  // matched as such by judge()
    largest = std::max(largest, std::abs(truth));
    square += truth * truth;
    eager_square += (eager - truth) * (eager - truth);
    f.eager_abs = std::max(f.eager_abs, std::abs(eager - truth));
    const double error = std::abs(ours - truth);
    if (error <= worst) continue;
    worst = error;
    f.abs = error;
    f.ours = ours;
    f.truth = truth;
    f.worst_index =
        shape.size() > 1 ? std::vector<int64_t>{i / columns, i % columns} : std::vector<int64_t>{i};
  }
  f.rel = largest > 0 ? f.abs / largest : f.abs;
  f.rel_l2 = static_cast<double>(testing::relative_l2(*t.ours, *t.truth));
  f.eager_rel_l2 = square > 0 ? std::sqrt(eager_square / square) : 0;
  const float at = std::abs(static_cast<float>(f.truth));
  const double step = t.ours->dtype() == DType::f64
                          ? std::nextafter(std::abs(f.truth), INFINITY) - std::abs(f.truth)
                          : static_cast<double>(std::nextafter(at, INFINITY) - at) *
                                (t.ours->dtype() == DType::bf16  ? 65536
                                 : t.ours->dtype() == DType::f16 ? 8192
                                                                 : 1);
  f.ulp = step > 0 ? f.abs / step : 0;
  f.tolerance = f.eager_abs + (is_16bit(t.ours->dtype()) ? 1e-4 : 1e-6) * largest;
  return f;
}

std::vector<ErrorFigure> figures(const testing::CaseOutputs& o, const testing::Yardsticks& y,
                                 const std::string& lane, bool passed) {
  std::vector<ErrorFigure> list;
  const auto& e = y.eager.front();
  const Truth tensors[] = {{"loss", &o.loss, &y.truth.loss, &e.loss},
                           {"lse", &o.lse, &y.truth.lse, &e.lse},
                           {"entropy", &o.entropy, &y.truth.entropy, &e.entropy},
                           {"dx", &o.dx, &y.truth.dx, &e.dx},
                           {"dw", &o.dw, &y.truth.dw, &e.dw},
                           {"db", &o.db, &y.truth.db, &e.db}};
  for (const Truth& t : tensors)
    if (t.ours->present() && static_cast<int64_t>(t.truth->size()) == t.ours->elements() &&
        t.eager->size() == t.truth->size() && t.ours->elements() > 0)
      list.push_back(figure(t, lane, passed));
  return list;
}

// The subject alone, or as the ranks of a world, into the same whole outputs.
testing::Outcome run_subject(const Subject& subject, const testing::Case& c, const Flags& f,
                             const ShardWorld& world) {
  if (world.size() == 1) return testing::run_lane(*subject.place, subject.lane, c);
  testing::Outcome o;
  o.out = c.out;
  lce::ShardedCall call{testing::inputs_of(c.in, testing::host_view),
                        testing::outputs_of(c, o.out, testing::host_view), c.options,
                        f.ranks.sequence_parallel};
  call.options.lane = subject.lane;
  o.result = world.call(call).result;
  return o;
}

struct Run {
  Context& context;
  const Flags& flags;
  const ShardWorld& world;
  std::vector<Outcome> outcomes;
  nlohmann::json cases = nlohmann::json::array();
  std::string trap{};  // what the denominator trap showed

  // Ranks of a batch, each with its own tokens: a local mean must be found out, a global one right.
  void denominator_trap() {
    const BatchScopes found = compare_batch_scopes(world.size(), flags.seed);
    trap = fmt::format(
        "{} ranks x {} tokens: with the local mean the gradient is {:.6g} x that of one batch of "
        "{}; with the global mean {:.6g} x",
        world.size(), found.tokens_each, found.local_factor, world.size() * found.tokens_each,
        found.global_factor);
    const bool right = std::abs(found.local_factor - world.size()) <= 1e-3 &&
                       std::abs(found.global_factor - 1) <= 1e-5 && found.note_names_factor;
    Outcome o{"batch-denominator", testing::host_lane(), "", right ? "" : trap, "", 0};
    cases.push_back({{"name", o.name},
                     {"lane", o.lane},
                     {"passed", right},
                     {"factor_local_mean", found.local_factor},
                     {"factor_global_mean", found.global_factor},
                     {"found", trap}});
    outcomes.push_back(std::move(o));
  }

  void one(const CheckCase& named, const testing::Case& c, const testing::Yardsticks& y,
           const Subject& subject) {
    Outcome o{named.name, subject.lane, "", "", "", 0};
    nlohmann::json entry = {{"name", o.name}, {"lane", o.lane}};
    std::vector<ErrorFigure> errors;
    if (auto reason = testing::declines(*subject.place, subject.lane, c)) {
      o.declined = *reason;
      entry["declined"] = *reason;
      if (!testing::may_decline(subject.lane, c)) o.complaint = "declined: " + *reason;
    } else {
      try {
        const auto ran = run_subject(subject, c, flags, world);
        o.complaint = ran.damage +
                      testing::judge(c, ran.out, y, testing::standing_of(subject.lane, ran.result));
        errors = figures(ran.out, y, subject.lane, o.complaint.empty());
      } catch (const Error& e) {
        // A lost rank ends the check: those that are left could only wait for it again.
        if (world.size() > 1 && e.kind() == ErrorKind::runtime) throw;
        o.complaint = std::string("threw: ") + e.what();
      }
    }
    if (!o.passed())
      entry["reproducer"] = o.reproducer =
          fmt::format("talea check --case {} --seed {} --lane {}{}{}", o.name, flags.seed, o.lane,
                      world.size() > 1 ? fmt::format(" --ranks {}", world.size()) : "",
                      flags.ranks.sequence_parallel ? " --sequence-parallel" : "");
    entry["passed"] = o.passed();
    if (!errors.empty()) {
      entry["errors"] = nlohmann::json::array();
      for (const ErrorFigure& f : errors) {
        entry["errors"].push_back(to_json(f));
        if (f.tensor == "dw") o.dw_rel_l2 = f.rel_l2;
      }
    }
    if (!o.complaint.empty()) entry["complaint"] = o.complaint;
    if (context.jsonl && world.speaks()) {
      fmt::print("{}\n", entry.dump());
      std::fflush(stdout);
    }
    cases.push_back(std::move(entry));
    outcomes.push_back(std::move(o));
  }
};

std::vector<Subject> subjects(Context& context, const Flags& f, bool ranked) {
  std::vector<Subject> list;
  bool known = f.lane.empty();
  for (const std::string& lane : linear_cross_entropy_lanes()) {
    if (!f.lane.empty() && lane != f.lane) continue;
    known = true;
    std::string why;
    testing::Place* place = testing::place_of(lane, why);
    if (place) {
      const auto here = testing::lanes_here();
      if (std::find(here.begin(), here.end(), lane) == here.end()) {
        place = nullptr;
        why = "not built";
      }
    }
    if (place && ranked && testing::is_device_lane(lane)) {
      place = nullptr;
      why = "a device lane; ranks of this command are threads or processes on host memory";
    }
    if (place && ranked && testing::is_yardstick_lane(lane)) {
      place = nullptr;
      why = "has no ranks";
    }
    require(place || f.lane.empty(), ErrorKind::unavailable, "lane {}: {}", lane, why);
    if (place)
      list.push_back({lane, place});
    else
      note(context, fmt::format("lane {} is left out: {}", lane, why));
  }
  require(known, ErrorKind::usage, "--lane {}: no such lane", f.lane);
  return list;
}

std::vector<CheckCase> chosen_cases(const Flags& f) {
  auto cases = check_cases(f.preset, f.seed);
  if (f.only_case.empty()) return cases;
  for (const char* preset : {"quick", "full"})
    for (CheckCase& c : check_cases(preset, f.seed))
      if (c.name == f.only_case) return {std::move(c)};
  fail(ErrorKind::usage, "--case {}: no such case; --list shows them", f.only_case);
}

void print_people(const Run& run, const std::vector<Subject>& lanes, int64_t failed) {
  Table table({"lane", ">cases", ">passed", ">declined", ">failed", ">worst dW rel. L2, fp32"});
  for (const Subject& s : lanes) {
    int64_t n = 0, bad = 0, declined = 0;
    double worst = 0;
    for (const Outcome& o : run.outcomes) {
      if (o.lane != s.lane) continue;
      ++n;
      bad += !o.passed();
      declined += !o.declined.empty() && o.passed();
      if (o.name.find("/fp32/") != std::string::npos && !(o.dw_rel_l2 <= worst))
        worst = o.dw_rel_l2;
    }
    table.row({s.lane, std::to_string(n), std::to_string(n - bad - declined),
               std::to_string(declined), std::to_string(bad), fmt::format("{:.2e}", worst)});
  }
  table.print();
  for (const Outcome& o : run.outcomes)
    if (!o.passed())
      fmt::print("\n{} on lane {}:\n  {}\n  {}\n", o.name, o.lane, o.complaint, o.reproducer);
  fmt::print("\n");
  int64_t judged = 0;
  for (const Outcome& o : run.outcomes) judged += o.declined.empty();
  if (!run.trap.empty()) fmt::print("{}\n", run.trap);
  verdict(failed == 0, failed == 0 ? fmt::format("passed: {} runs match fp64 truth", judged)
                                   : fmt::format("FAILED: {} of {} runs", failed, judged));
}

void execute(Context& context, const Flags& f) {
  require_other_file("--receipt", f.receipt, {f.results_from});
  if (!f.results_from.empty())
    return record(context, ReceiptKind::check, f.results_from, f.receipt);
  auto cases = chosen_cases(f);
  if (f.list) {
    auto names = nlohmann::json::array();
    for (const CheckCase& c : cases) names.push_back({{"name", c.name}});
    if (context.machine()) return print_list(names, context.jsonl);
    for (const CheckCase& c : cases) fmt::print("{}\n", c.name);
    return;
  }
  const ShardWorld world(f.ranks);
  Receipt receipt(ReceiptKind::check, provenance_of(context));
  const auto lanes = subjects(context, f, world.size() > 1);
  Run run{context, f, world, {}, nlohmann::json::array()};
  {
    Progress progress(context, "check", static_cast<int64_t>(cases.size()), "cases");
    for (CheckCase& named : cases) {
      check_interrupt();
      if (f.ranks.sequence_parallel)  // tokens are shared out evenly
        named.spec.tokens = (named.spec.tokens + world.size() - 1) / world.size() * world.size();
      const testing::Case c = testing::make_case(named.spec);
      const testing::Yardsticks y = testing::yardsticks(c);
      for (const Subject& s : lanes) run.one(named, c, y, s);
      progress.advance(1, named.name);
    }
  }
  if (world.size() > 1 && !world.processes() && f.only_case.empty()) run.denominator_trap();
  int64_t failed = 0, passed = 0;
  for (const Outcome& o : run.outcomes) {
    failed += !o.passed();
    passed += o.passed() && o.declined.empty();
  }
  nlohmann::json section = {{"preset", f.only_case.empty() ? f.preset : f.only_case},
                            {"lanes", nlohmann::json::array()},
                            {"passed", passed},
                            {"failed", failed},
                            {"seed", f.seed},
                            {"cases", run.cases}};
  for (const Subject& s : lanes) section["lanes"].push_back(s.lane);
  receipt.title("Parity of every lane");
  if (world.size() > 1) {
    section["ranks"] = world.size();
    section["engine"] = world.engine();
    section["sequence_parallel"] = f.ranks.sequence_parallel;
  }
  receipt.section("check", section).verdict(failed == 0 ? Verdict::passed : Verdict::failed);
  context.exit_code = failed == 0 ? 0 : static_cast<int>(ErrorKind::check_failed);
  if (!world.speaks()) return;
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (!context.machine()) print_people(run, lanes, failed);
}

}  // namespace

void register_check(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(app, context,
                                 {"check", "parity of every lane present against fp64 truth",
                                  "talea check --preset quick --receipt check.json",
                                  ", all passed; 1 a case failed (one reproducer line each)"});
  sub->add_option("--preset", f->preset, "the matrix of cases")
      ->check(CLI::IsMember({"quick", "full"}))
      ->capture_default_str();
  sub->add_option("--case", f->only_case, "one case by name");
  sub->add_option("--seed", f->seed, "of the data")->capture_default_str();
  sub->add_option("--lane", f->lane, "one lane; default every lane present");
  add_isa(*sub);
  sub->add_flag("--list", f->list, "names of the cases");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->add_option("--results-from", f->results_from,
                  "no check: the receipt of cases that another program judged, .json");
  f->ranks.add(*sub);
  f->ranks.add_dx_sum(*sub);
  sub->callback([f, sub, &context] {
    if (!f->results_from.empty())
      refuse_others(*sub, {"--results-from", "--receipt"}, "--results-from checks nothing");
    if (f->list)
      refuse_others(*sub, {"--list", "--preset", "--case", "--seed"}, "--list runs none");
    if (!f->only_case.empty()) refuse_unread(*sub, {"--preset"}, "--case names one case");
    execute(context, *f);
  });
}

}  // namespace talea::cli
