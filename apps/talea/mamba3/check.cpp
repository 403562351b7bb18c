// What: `talea check --operator mamba3`: every host lane of the scan against the definition in
// fp64.
// Why: whoever doubts a lane on his machine finds out with one command, and a failure repeats.
// Never: a tolerance of its own; the rule is that of the tests.
#include <CLI/CLI.hpp>
#include <cmath>
#include <nlohmann/json.hpp>

#include "call.hpp"
#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "flags.hpp"
#include "io/host_tensor.hpp"
#include "io/receipt_file.hpp"
#include "progress.hpp"
#include "register.hpp"
#include "table.hpp"
#include "yardsticks/mamba3/draw.hpp"
#include "yardsticks/mamba3/judge.hpp"

namespace talea::cli {
namespace {

namespace ys = yardsticks::mamba3;
using scan::SizeFlags;

struct Flags {
  SizeFlags size{2, 40, 4, 2, 16, 8, 2};
  std::string preset = "quick", only_case, lane, dtypes = "fp32,bf16,fp16", receipt;
  std::string pass = "both";
  bool list = false, sizes_given = false;
  int64_t chunk = 0;
  uint64_t seed = 1;
};

struct Named {
  std::string name;
  ys::Case c;
};

ys::Sizes sizes_of(const SizeFlags& s) {
  ys::Sizes z;
  z.B = s.batch, z.S = s.tokens, z.H = s.heads, z.G = s.groups, z.N = s.state_dim;
  z.P = s.head_dim, z.R = s.rank, z.A = s.state_dim / 2, z.rank_axis = s.rank > 1;
  return z;
}

void add_matrix(std::vector<Named>& cases, const std::string& dtype, uint64_t seed) {
  const std::pair<const char*, ys::Sizes> shapes[] = {
      {"siso", {2, 40, 4, 1, 16, 8, 1, 8, false, false}},
      {"groups", {2, 40, 6, 3, 16, 8, 2, 4, true, false}},
      {"mimo", {1, 75, 4, 2, 32, 16, 4, 16, true, true}},
      {"one_token", {2, 1, 4, 2, 16, 8, 2, 8, true, false}},
      {"no_tokens", {2, 0, 4, 2, 16, 8, 2, 8, true, false}}};
  for (const auto& [name, sizes] : shapes)
    cases.push_back(
        {fmt::format("{}/{}", name, dtype), ys::full_case(sizes, parse_dtype(dtype), seed)});
}

// What the asked pass has no form of: steps of packed sequences, gradients of nothing.
bool takes(const std::string& pass, const ys::Case& c) {
  return pass == "step" ? !c.has("cu_seqlens") : pass != "backward" || c.has("d_out");
}

std::vector<Named> cases_of(const Flags& f) {
  std::vector<Named> cases;
  require(f.chunk >= 0, ErrorKind::usage, "--chunk {}: must be >= 0 (0: the lane's)", f.chunk);
  for (const std::string& dtype : split(f.dtypes, ',')) {
    require(parse_dtype(dtype) != DType::f64, ErrorKind::usage,
            "--dtype fp64: lane unfused, the yardstick, multiplies in fp32");
    if (f.sizes_given)
      cases.push_back(
          {"sizes/" + dtype, ys::full_case(sizes_of(f.size), parse_dtype(dtype), f.seed)});
    else
      add_matrix(cases, dtype, f.seed);
  }
  if (!f.sizes_given && (f.preset == "full" || f.only_case.rfind("drawn/", 0) == 0)) {
    int number = 0;
    for (ys::Case& c : ys::pairwise_cases(f.seed))
      cases.push_back({fmt::format("drawn/{}", number++), std::move(c)});
  }
  std::erase_if(cases, [&](const Named& n) { return !takes(f.pass, n.c); });
  for (const Named& n : cases)  // sizes that no scan can have, before anything reads by them
    describe(mamba3::Pass::forward, ys::inputs_of(n.c.in, false), {}, n.c.options);
  if (f.only_case.empty()) return cases;
  for (Named& n : cases)
    if (n.name == f.only_case) return {std::move(n)};
  fail(ErrorKind::usage, "--case {}: no such case; --list shows them", f.only_case);
}

mamba3::Result run_pass(mamba3::Pass pass, const ys::Case& c, const ys::Tensors& in,
                        ys::Tensors& out) {
  const bool backward = pass == mamba3::Pass::backward;
  for (const std::string& name : backward ? backward_outputs(c) : forward_outputs(c)) {
    ys::HostTensor t(output_dtype(c, name), shape_of(c, name));
    for (int64_t i = 0; i < t.elements(); ++i) t.set(i, c.accumulate ? 1.0 : NAN);
    out[name] = std::move(t);
  }
  const mamba3::Inputs inputs = ys::inputs_of(in, backward);
  mamba3::Outputs outputs = ys::outputs_of(out, backward);
  outputs.d.accumulate_parameters = c.accumulate;
  const int64_t bytes = workspace_bytes(describe(pass, inputs, outputs, c.options));
  const io::HostTensor memory = io::allocate_tensor(DType::i64, {bytes / 8 + 1});
  const Workspace workspace{memory.view.data, memory.bytes()};
  return backward ? mamba3::backward(inputs, outputs, c.options, workspace)
                  : mamba3::forward(inputs, outputs, c.options, workspace);
}

// Forward as one step a token: out and the states behind the last one.
ys::Tensors run_as_steps(const ys::Case& c) {
  ys::Tensors out;
  for (const std::string& name : forward_outputs(c)) {
    ys::HostTensor t(output_dtype(c, name), shape_of(c, name));
    for (int64_t i = 0; i < t.elements(); ++i) t.set(i, NAN);
    out[name] = std::move(t);
  }
  scan::run_steps(ys::inputs_of(c.in, false), ys::outputs_of(out, false), c.options);
  return out;
}

// The passes of a lane that were asked for; the chunk that forward took.
ys::Tensors run_lane(const std::string& lane, ys::Case c, const std::string& pass, int64_t& chunk) {
  c.options.lane = lane;
  if (lane == "reference") c.options.chunk = 0;
  chunk = 0;
  if (pass == "step") return run_as_steps(c);
  ys::Tensors out;
  if (pass != "backward") chunk = run_pass(mamba3::Pass::forward, c, c.in, out).chunk_tokens;
  if (pass != "forward" && c.has("d_out"))
    chunk = std::max(chunk, run_pass(mamba3::Pass::backward, c, c.in, out).chunk_tokens);
  return out;
}

struct Outcome {
  std::string name, lane, complaint, reproducer;
  double out_rel_l2 = 0;
};

ErrorFigure figure(const ys::Case& c, const std::string& lane, const std::string& tensor,
                   const std::vector<double>& ours, const std::vector<double>& truth,
                   const std::vector<double>& eager) {
  ErrorFigure f;
  f.tensor = tensor;
  f.lane = lane;
  f.rel_l2 = ys::relative_l2(ours, truth);
  f.eager_rel_l2 = ys::relative_l2(eager, truth);
  size_t worst = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double off = std::abs(ours[i] - truth[i]);
    f.eager_abs = std::max(f.eager_abs, std::abs(eager[i] - truth[i]));
    if (off <= f.abs) continue;
    f.abs = off;
    worst = i;
  }
  if (truth.empty()) return f;
  f.ours = ours[worst];
  f.truth = truth[worst];
  f.rel = f.abs / std::max(std::abs(f.truth), 1e-30);
  const bool sixteen = is_16bit(output_dtype(c, tensor));
  f.ulp = f.rel * (output_dtype(c, tensor) == DType::f64 ? 0x1p52 : sixteen ? 0x1p8 : 0x1p23);
  const auto shape = shape_of(c, tensor);
  for (size_t axis = shape.size(), rest = worst; axis-- > 0;) {
    const auto extent = static_cast<size_t>(std::max<int64_t>(shape[axis], 1));
    f.worst_index.insert(f.worst_index.begin(), static_cast<int64_t>(rest % extent));
    rest /= extent;
  }
  return f;
}

struct Run {
  const Context& context;
  const Flags& flags;
  std::vector<Outcome> outcomes;
  nlohmann::json cases = nlohmann::json::array();

  void one(const Named& named, const ys::Values& truth, const std::string& lane) {
    Outcome o{named.name, lane, "", "", 0};
    nlohmann::json entry = {{"name", o.name}, {"lane", o.lane}};
    try {
      int64_t chunk = 0;
      const ys::Tensors ours = run_lane(lane, named.c, flags.pass, chunk);
      ys::Case same = named.c;
      if (chunk > 0) same.options.chunk = chunk;
      const ys::Tensors eager =
          run_lane("unfused", same, flags.pass == "step" ? "forward" : flags.pass, chunk);
      o.complaint = ys::judge(named.c, ours, truth, eager);
      entry["errors"] = nlohmann::json::array();
      for (const auto& [name, tensor] : ours) {
        if (name == "saved" || name == "status") continue;
        ErrorFigure f =
            figure(named.c, lane, name, tensor.values(), truth.at(name), eager.at(name).values());
        f.passed = o.complaint.find(name + ":") == std::string::npos;
        if (name == "out") o.out_rel_l2 = f.rel_l2;
        entry["errors"].push_back(to_json(f));
      }
    } catch (const Error& e) {
      o.complaint = std::string("threw: ") + e.what();
    }
    if (!o.complaint.empty()) {
      o.reproducer =
          fmt::format("talea check --operator mamba3 --case {} --seed {} --lane {} --pass {}",
                      o.name, flags.seed, o.lane, flags.pass);
      entry["reproducer"] = o.reproducer;
      entry["complaint"] = o.complaint;
    }
    entry["passed"] = o.complaint.empty();
    if (context.jsonl) fmt::print("{}\n", entry.dump());
    cases.push_back(std::move(entry));
    outcomes.push_back(std::move(o));
  }
};

std::vector<std::string> lanes_of(const Flags& f) {
  std::vector<std::string> lanes;
  bool known = f.lane.empty();
  for (const std::string& lane : mamba3::lanes()) {
    if (!f.lane.empty() && lane != f.lane) continue;
    known = true;
    if (lane == "sm90" || lane == "cuda") continue;
    if (f.pass == "step" && lane == "unfused") continue;
    lanes.push_back(lane);
  }
  require(known, ErrorKind::usage, "--lane {}: no such lane", f.lane);
  require(f.pass != "step" || f.lane != "unfused", ErrorKind::usage,
          "--lane unfused: the yardstick of steps is its scan; its own carry a rounded angle from "
          "token to token, and are not judged");
  require(!lanes.empty(), ErrorKind::unavailable,
          "--lane {}: a device lane; this checks host lanes", f.lane);
  return lanes;
}

void print_people(const Run& run, const std::vector<std::string>& lanes, int64_t failed) {
  Table table({"lane", ">cases", ">passed", ">failed", ">worst out rel. L2, fp32"});
  for (const std::string& lane : lanes) {
    int64_t n = 0, bad = 0;
    double worst = 0;
    for (const Outcome& o : run.outcomes) {
      if (o.lane != lane) continue;
      ++n;
      bad += !o.complaint.empty();
      if (o.name.ends_with("/fp32") && !(o.out_rel_l2 <= worst)) worst = o.out_rel_l2;
    }
    table.row({lane, std::to_string(n), std::to_string(n - bad), std::to_string(bad),
               fmt::format("{:.2e}", worst)});
  }
  table.print();
  for (const Outcome& o : run.outcomes)
    if (!o.complaint.empty())
      fmt::print("\n{} on lane {}:\n  {}\n  {}\n", o.name, o.lane, o.complaint, o.reproducer);
  fmt::print("\n");
  verdict(failed == 0, failed == 0
                           ? fmt::format("passed: {} runs match fp64 truth", run.outcomes.size())
                           : fmt::format("FAILED: {} of {} runs", failed, run.outcomes.size()));
}

void execute(Context& context, const Flags& f) {
  require_other_file("--receipt", f.receipt, {});
  std::vector<Named> cases = cases_of(f);
  if (f.list) {
    auto names = nlohmann::json::array();
    for (const Named& n : cases) names.push_back({{"name", n.name}});
    if (context.machine()) return print_list(names, context.jsonl);
    for (const Named& n : cases) fmt::print("{}\n", n.name);
    return;
  }
  Receipt receipt(ReceiptKind::check, provenance_of(context));
  const std::vector<std::string> lanes = lanes_of(f);
  Run run{context, f, {}, nlohmann::json::array()};
  {
    Progress progress(context, "check", static_cast<int64_t>(cases.size()), "cases");
    for (Named& named : cases) {
      check_interrupt();
      if (f.chunk > 0) named.c.options.chunk = f.chunk;
      const ys::Values truth = ys::oracle(named.c);
      for (const std::string& lane : lanes) run.one(named, truth, lane);
      progress.advance(1, named.name);
    }
  }
  int64_t failed = 0;
  for (const Outcome& o : run.outcomes) failed += !o.complaint.empty();
  receipt.title("Mamba-3 scan: parity of every host lane")
      .section("check", {{"preset", f.sizes_given         ? "sizes"
                                    : f.only_case.empty() ? f.preset
                                                          : f.only_case},
                         {"operator", "mamba3"},
                         {"pass", f.pass},
                         {"lanes", lanes},
                         {"passed", static_cast<int64_t>(run.outcomes.size()) - failed},
                         {"failed", failed},
                         {"seed", f.seed},
                         {"cases", run.cases}})
      .verdict(failed == 0 ? Verdict::passed : Verdict::failed);
  context.exit_code = failed == 0 ? 0 : static_cast<int>(ErrorKind::check_failed);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (!context.machine()) print_people(run, lanes, failed);
}

}  // namespace

void register_scan_check(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub =
      add_subcommand(app, context,
                     {"check", "parity of every host lane of the scan against fp64 truth",
                      "talea check --operator mamba3 --preset quick --receipt check.json",
                      ", all passed; 1 a case failed (one reproducer line each)"});
  sub->add_option("--preset", f->preset, "the matrix of cases; full: pairs of all choices, too")
      ->check(CLI::IsMember({"quick", "full"}))
      ->capture_default_str();
  sub->add_option("--case", f->only_case, "one case by name");
  f->size.add(*sub);
  sub->add_option("--dtype", f->dtypes, "one or more, parted by commas")->capture_default_str();
  sub->add_option("--chunk", f->chunk, "tokens of a chunk; 0: the lane's")->capture_default_str();
  sub->add_option("--pass", f->pass, "both: forward and backward; step: forward, a token at a time")
      ->check(CLI::IsMember({"both", "forward", "backward", "step"}))
      ->capture_default_str();
  sub->add_option("--seed", f->seed, "of the data")->capture_default_str();
  sub->add_option("--lane", f->lane, "one lane; default every host lane");
  add_isa(*sub);
  sub->add_flag("--list", f->list, "names of the cases");
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, sub, &context] {
    for (const char* flag :
         {"--batch", "--tokens", "--heads", "--groups", "--state-dim", "--head-dim", "--rank"})
      f->sizes_given = f->sizes_given || sub->count(flag) > 0;
    if (f->list)
      refuse_unread(*sub, {"--lane", "--isa", "--receipt", "--chunk"}, "--list runs none");
    if (f->sizes_given || !f->only_case.empty())
      refuse_unread(*sub, {"--preset"}, "sizes and --case are a case each");
    if (f->pass == "step") {
      note_unread(context, *sub, {"--chunk"}, "a step has no chunks");
      f->chunk = 0;
    }
    blame_flags([&] { execute(context, *f); });
  });
}

}  // namespace talea::cli
