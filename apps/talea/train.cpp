// What: `talea train`: long-horizon training parity on text, the gates and the mutant table.
// Why: over hundreds of updates a loss shows what one step cannot.
// Never: reports a run that did not complete as passed.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "context.hpp"
#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "io/atomic_file.hpp"
#include "io/receipt_file.hpp"
#include "progress.hpp"
#include "report/report.hpp"
#include "table.hpp"
#include "train_options.hpp"

namespace talea::cli {
namespace {

using nlohmann::json;

void refuse_unread_of(const CLI::App& sub, const TrainFlags& f) {
  if (f.mutant_table)
    refuse_others(sub,
                  {"--mutant-table", "--quick", "--text", "--loss-lane", "--stream", "--seed",
                   "--threads", "--json-out", "--report", "--ranks"},
                  "--mutant-table has configurations of its own");
  else if (!f.gates.empty())
    refuse_others(sub,
                  {"--gate", "--text", "--loss-lane", "--mutant", "--stream", "--seed", "--threads",
                   "--json-out", "--report", "--ranks"},
                  "--gate has a configuration of its own");
  const train::TrainConfig& c = f.run.config;
  if (c.optimizer.kind == train::OptimizerKind::sgd)
    refuse_unread(sub, {"--beta1", "--beta2", "--eps"}, "of --optimizer adamw");
  else
    refuse_unread(sub, {"--momentum"}, "of --optimizer sgd");
  if (c.optimizer.schedule == train::Schedule::constant)
    refuse_unread(sub, {"--min-lr"}, "of --schedule linear and cosine");
  if (c.model.form == "tiny")
    refuse_unread(sub, {"--mixer", "--heads", "--layers", "--tied"}, "of --model transformer");
  else if (c.model.mixer != "attention")
    refuse_unread(sub, {"--heads"}, "of --mixer attention");
  if (!f.mutant_table) refuse_unread(sub, {"--quick"}, "needs --mutant-table");
  if (f.json_out.empty() && f.report.empty() && !sub.count("--json"))
    refuse_unread(sub, {"--curve-points"}, "needs --json-out, --report or --json");
}

class TrainCommand {
 public:
  TrainCommand(Context& context, TrainFlags& flags) : context_(context), flags_(flags) {}

  void run() {
    check_files();
    const RankWorld world(flags_.ranks);
    join(world);
    receipt_.emplace(ReceiptKind::train, provenance_of(context_));
    if (flags_.mutant_table)
      mutants();
    else if (!flags_.gates.empty())
      gates();
    else
      plain();
    if (signal_) throw Interrupted{signal_};
  }

 private:
  void check_files() const {
    std::vector<std::string> taken = flags_.run.config.data.text_files;
    for (const auto& [flag, file] :
         {std::pair("--json-out", &flags_.json_out), std::pair("--report", &flags_.report),
          std::pair("--initial-parameters-out", &flags_.run.initial_parameters_out)}) {
      require_other_file(flag, *file, taken);
      taken.push_back(*file);
    }
  }

  // Every rank trains the whole model and holds the loss' shard; rank 0 alone speaks and writes.
  void join(const RankWorld& world) {
    if (world.size() == 1) return;
    require(flags_.gates.empty() && !flags_.mutant_table, ErrorKind::usage,
            "--ranks {}: gates and the mutant table run in a world of one", world.size());
    require(!world.processes() || flags_.run.checkpoint_dir.empty(), ErrorKind::usage,
            "--checkpoint {}: not under mpirun, where every rank would write it",
            flags_.run.checkpoint_dir);
    train::TrainConfig& c = flags_.run.config;
    c.ranks = world.size();
    c.world = world.mpi();
    c.sequence_parallel = flags_.ranks.sequence_parallel;
    engine_ = fmt::format("the loss ran on {} vocabulary ranks ({})", world.size(), world.engine());
    if (world.speaks()) return;
    context_.quiet = true;
    context_.json = context_.jsonl = false;
    flags_.json_out.clear();
    flags_.report.clear();
    require(std::freopen("/dev/null", "w", stdout), ErrorKind::runtime,
            "/dev/null: cannot be opened");
  }

  // The progress line of a run; false once a signal asked to stop.
  train::OnStep watcher(const std::string& label) {
    return [this, label, bar = std::shared_ptr<Progress>()](
               const train::StepRecord& r, const train::StepChecks& checks, int64_t total) mutable {
      if (!bar || r.candidate.step == 1)
        bar = std::make_shared<Progress>(context_, label, total, "updates");
      bar->advance(r.candidate.step - shown(r.candidate.step),
                   fmt::format("{:.0f} tokens/s  loss {:.4f}  fp64 {:.4f}  drift/band {:.2f}",
                               double(r.candidate.tokens) / r.seconds, r.candidate.loss,
                               r.reference.loss, checks.band_ratio()));
      if (context_.jsonl && flags_.gates.empty() && !flags_.mutant_table) show_line(r);
      try {
        check_interrupt();
      } catch (const Interrupted& stop) {
        signal_ = stop.signal;
        return false;
      }
      return true;
    };
  }

  // Steps that the bar has shown before this one (a resumed run starts in the middle).
  int64_t shown(int64_t step) {
    const int64_t before = step == 1 || last_shown_ >= step ? 0 : last_shown_;
    last_shown_ = step;
    return before;
  }

  // A reader that went away (head, less) ends the lines, not the run: its files and its exit code
  // are still wanted.
  void show_line(const train::StepRecord& r) {
    if (reader_gone_) return;
    const std::string line = train::to_line(r) + "\n";
    if (std::fwrite(line.data(), 1, line.size(), stdout) == line.size()) return;
    const int number = errno;
    require(number == EPIPE, ErrorKind::runtime, "stdout: {}", std::strerror(number));
    reader_gone_ = true;
  }

  void plain() {
    const train::RunResult r = train::run_training(flags_.run, watcher("train"));
    json section = train::train_section(r.facts, r.steps, r.checks);
    section["preset"] = flags_.preset;
    section["completed"] = !r.stopped;
    receipt_->section("train", section).section("gates", train::gates_of(r.checks));
    if (!engine_.empty()) receipt_->note(engine_);
    receipt_->title(fmt::format("talea train: stream {}, seed {}", r.facts.config.data.stream,
                                r.facts.config.seed));
    const bool is_void = r.checks.first_void() >= 0;
    if (is_void)
      receipt_->note(
          fmt::format("void: the twins left each other by more than {:g} at step {}; no "
                      "drift was judged from there on",
                      train::Tolerances{}.void_above, r.checks.first_void()));
    finish(r.passed(), r.stopped, is_void);
    if (context_.machine()) return;
    show_run(r);
    show_checks(r.checks.checks());
    if (r.stopped) return verdict(false, "stopped before its end");
    std::string name;
    const int64_t first = r.checks.first_past(&name);
    if (is_void)
      return verdict(false, fmt::format("void: from step {} on the twins are no yardstick; the "
                                        "drift of this run shows nothing",
                                        r.checks.first_void()));
    if (r.passed())
      verdict(true, "the candidate stayed inside the noise band and every tolerance");
    else
      verdict(false, fmt::format("first past its tolerance: {} at step {}{}", name, first,
                                 r.facts.first_stage.empty()
                                     ? std::string()
                                     : "; first stage that differs: " + r.facts.first_stage));
  }

  void show_run(const train::RunResult& r) {
    if (r.steps.empty()) return;
    const train::StepRecord& last = r.steps.back();
    double seconds = 0;
    int64_t tokens = 0;
    for (const train::StepRecord& s : r.steps) {
      seconds += s.seconds;
      tokens += s.candidate.tokens;
    }
    Facts facts;
    facts.add("model", fmt::format("{}, {} parameters", r.facts.config.model.form,
                                   grouped(r.facts.parameters)));
    facts.add("data", fmt::format("stream {}, {} bytes of text", r.facts.config.data.stream,
                                  grouped(r.facts.corpus_bytes)));
    facts.add("loss lane", r.facts.lane);
    if (!engine_.empty()) facts.add("ranks", engine_);
    facts.add("updates", fmt::format("{} of {}", last.candidate.step, r.facts.total_steps));
    facts.add("loss",
              fmt::format("{:.4f} -> {:.4f}, fp64 reference {:.4f}", r.steps.front().candidate.loss,
                          last.candidate.loss, last.reference.loss));
    facts.add("candidate alone",
              fmt::format("{:.2f} ms an update, {:.0f} tokens/s",
                          seconds * 1e3 / double(r.steps.size()), double(tokens) / seconds));
    facts.print();
  }

  static void show_checks(const std::vector<train::Check>& checks) {
    Table table({"comparison", ">worst", ">tolerance", ">at step", "verdict"});
    for (const train::Check& c : checks)
      table.row({c.name, fmt::format("{:.3g}", c.worst), fmt::format("{:.3g}", c.tolerance),
                 c.worst_step < 0 ? "" : std::to_string(c.worst_step),
                 c.is_void  ? "void"
                 : c.passed ? "passed"
                            : "FAILED"});
    table.print();
  }

  train::GateContext gate_context() {
    train::GateContext g;
    g.text_files = flags_.run.config.data.text_files;
    g.loss_lane = flags_.run.config.loss_lane;
    g.mutant = flags_.run.twin.mutant;
    g.stream = flags_.stream;
    g.seed = flags_.run.config.seed;
    g.threads = flags_.run.config.threads;
    return g;
  }

  void gates() {
    bool passed = true, stopped = false;
    json list = json::array();
    Table table({"gate", "verdict", ">comparisons", ">seconds", "worst"});
    for (const std::string& name : flags_.gates) {
      train::GateContext g = gate_context();
      g.on_step = watcher(name);
      const train::GateResult r = train::run_gate(name, g);
      passed = passed && r.passed();
      stopped = stopped || r.stopped;
      list.push_back(gate_json(r));
      table.row({r.name, r.passed() ? "passed" : "FAILED", std::to_string(r.checks.size()),
                 fmt::format("{:.1f}", r.seconds), worst_of(r)});
      if (stopped) break;
    }
    receipt_->section("gates", list);
    receipt_->section("train", {{"curves", json::array()},
                                {"seed", flags_.run.config.seed},
                                {"loss_lane", flags_.run.config.loss_lane},
                                {"mutant", flags_.run.twin.mutant},
                                {"completed", !stopped}});
    receipt_->title("talea train: gates");
    finish(passed, stopped);
    if (context_.machine()) return;
    table.print();
    verdict(passed && !stopped, stopped  ? "stopped before its end"
                                : passed ? "every gate passed"
                                         : "a gate failed");
  }

  static std::string worst_of(const train::GateResult& r) {
    const train::Check* worst = nullptr;
    for (const train::Check& c : r.checks) {
      if (!c.passed) {
        worst = &c;
        break;
      }
      if (c.tolerance > 0 && (!worst || c.worst / c.tolerance > worst->worst / worst->tolerance))
        worst = &c;
    }
    if (!worst) return "";
    return fmt::format("{}: {:.3g} of {:.3g}{}", worst->name, worst->worst, worst->tolerance,
                       r.first_stage.empty() ? "" : "; first stage: " + r.first_stage);
  }

  static json gate_json(const train::GateResult& r) {
    json checks = json::array();
    for (const train::Check& c : r.checks) checks.push_back(train::to_json(c));
    return {{"name", r.name},       {"passed", r.passed()},
            {"text", r.text},       {"streams", r.streams},
            {"seconds", r.seconds}, {"first_stage_that_differs", r.first_stage},
            {"checks", checks}};
  }

  void mutants() {
    Table table({"mutant", "gate named for it", "verdict", "failed by"});
    json list = json::array();
    bool passed = true;
    Progress bar(context_, "mutants", static_cast<int64_t>(train::mutants().size()), "mutants");
    auto on_row = [&](const train::MutantRow& row) {
      std::string by;
      for (const std::string& g : row.killed_by) by += (by.empty() ? "" : ", ") + g;
      table.row({row.name, row.named_gate, row.killed() ? "killed" : "SURVIVED", by});
      list.push_back({{"name", row.name},
                      {"text", row.text},
                      {"killed", row.killed()},
                      {"killed_by", row.killed_by},
                      {"examined_by", row.examined},
                      {"named_gate", row.named_gate}});
      passed = passed && row.killed();
      bar.advance();
      check_interrupt();
    };
    train::mutant_table(gate_context(), flags_.quick, on_row);
    bar.clear();
    receipt_->section("mutants", list);
    const json clean = nothing_planted(table, passed);
    receipt_->section("gates", clean);
    receipt_->section("train", {{"curves", json::array()}, {"seed", flags_.run.config.seed}});
    receipt_->title("talea train: planted mistakes against the gates");
    finish(passed, false);
    if (context_.machine()) return;
    table.print();
    verdict(passed, passed ? "every mutant is failed by the gate named for it, and no gate fails "
                             "where nothing is planted"
                           : "a mutant survived the gate named for it, or a clean run failed");
  }

  // The same gates on right arithmetic: a gate that always fails kills every mutant, too.
  json nothing_planted(Table& table, bool& passed) {
    json list = json::array();
    std::string failed;
    for (const train::Gate& gate : train::gates()) {
      train::GateContext g = gate_context();
      // Every stream has a long run of its own; here, the one of the mutant named for the gate.
      if (flags_.quick && std::strcmp(gate.name, "realistic_long_horizon") == 0)
        g.stream = "repeat";
      const train::GateResult r = train::run_gate(gate.name, g);
      list.push_back(gate_json(r));
      if (!r.passed()) failed += (failed.empty() ? "" : ", ") + r.name;
      check_interrupt();
    }
    passed = passed && failed.empty();
    table.row({"nothing planted", "all", failed.empty() ? "passed" : "FAILED", failed});
    return list;
  }

  void finish(bool passed, bool stopped, bool is_void = false) {
    receipt_->verdict(stopped || is_void ? Verdict::not_checked
                      : passed           ? Verdict::passed
                                         : Verdict::failed);
    if (!flags_.json_out.empty()) io::write_receipt(flags_.json_out, *receipt_);
    if (!flags_.report.empty())
      io::write_file_atomically(flags_.report, report::render_html({{flags_.json_out, *receipt_}}));
    if (context_.json) fmt::print("{}\n", receipt_->text());
    if (!passed && !stopped) context_.exit_code = static_cast<int>(ErrorKind::check_failed);
  }

  Context& context_;
  TrainFlags& flags_;
  std::optional<Receipt> receipt_;
  std::string engine_;  // of the loss' ranks; empty: a world of one
  int signal_ = 0;
  int64_t last_shown_ = 0;
  bool reader_gone_ = false;
};

}  // namespace

void register_train(CLI::App& app, Context& context) {
  CLI::App* command = add_subcommand(
      app, context,
      {"train", "trains on text beside an fp64 reference and says when the loss leaves it",
       "talea train --text README.md --preset smoke --json-out train.json",
       "; 1 past a tolerance, a gate failed or a mutant survived"});
  auto flags = std::make_shared<TrainFlags>();
  bind_train_flags(*command, *flags);
  command->callback([&context, flags, command] {
    settle_train_flags(*flags);
    refuse_unread_of(*command, *flags);
    TrainCommand(context, *flags).run();
  });
}

}  // namespace talea::cli
