// What: `talea bench --operator mamba3`: lanes beside the plain fp32 product, in one process.
// Why: useful flops mean something only beside the rate of a product measured just then.
// Never: compares with a number of another run.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "data.hpp"
#include "device/cpu/onednn.hpp"
#include "io/receipt_file.hpp"
#include "memory.hpp"
#include "ops/mamba3/receipt.hpp"
#include "progress.hpp"
#include "register.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

using namespace scan;
using Clock = std::chrono::steady_clock;

struct Flags {
  scan::OptionFlags options;
  SizeFlags size;
  std::string dtypes = "fp32", lanes = "cpu", pass = "both", receipt;
  int repeats = 5;
  uint64_t seed = 1;
};

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// The plain product, large enough to run at its own rate.
class PlainProduct {
 public:
  PlainProduct()
      : a_(io::allocate_tensor(DType::f32, {side, side})),
        b_(io::allocate_tensor(DType::f32, {side, side})),
        c_(io::allocate_tensor(DType::f32, {side, side})) {
    for (int64_t i = 0; i < side * side; ++i) at(a_)[i] = 0.25f, at(b_)[i] = 0.125f;
  }

  double flops_per_ms() {
    const auto begin = Clock::now();
    cpu::onednn_product({false, true, side, side, side, at(a_), side, at(b_), side, at(c_), side});
    return 2.0 * side * side * side / ms_since(begin);
  }

 private:
  static constexpr int64_t side = 1024;
  static float* at(const io::HostTensor& t) { return static_cast<float*>(t.view.data); }
  io::HostTensor a_, b_, c_;
};

// One pass of one lane on one problem.
struct Call {
  mamba3::Pass pass;
  mamba3::Inputs in;
  mamba3::Outputs out;
  mamba3::Problem problem;
  mamba3::Result last;
  io::HostTensor memory;
};

struct Subject {
  std::string name, lane;
  mamba3::Options options;
  const Drawn* drawn = nullptr;
  std::vector<Call> calls;
  double flops = 0;
  int64_t peak_bytes = -1;
  std::vector<double> ms, ratios;
};

void run_call(const Subject& s, Call& c) {
  const Workspace workspace{c.memory.view.data, c.memory.bytes()};
  switch (c.pass) {
    case mamba3::Pass::forward:
      c.last = forward(c.in, c.out, s.options, workspace);
      return;
    case mamba3::Pass::backward:
      c.last = backward(c.in, c.out, s.options, workspace);
      return;
    case mamba3::Pass::step:
      c.last = step(s.drawn->step, s.options, workspace);
  }
}

Subject make_subject(const Flags& f, const std::string& lane, const std::string& dtype,
                     const Drawn& drawn) {
  Subject s;
  s.lane = lane;
  s.name = fmt::format("{} {} {}", lane, dtype, f.pass);
  s.options = f.options.options();
  s.options.lane = lane;
  s.drawn = &drawn;
  std::vector<mamba3::Pass> passes = {mamba3::Pass::forward, mamba3::Pass::backward};
  if (f.pass != "both") passes = {parse_pass(f.pass)};
  for (const mamba3::Pass pass : passes) {
    Call c{pass, drawn.in, pass == mamba3::Pass::forward ? drawn.out : drawn.d, {}, {}, {}};
    if (pass == mamba3::Pass::forward) c.in.d_out = {};
    c.problem = problem_of(drawn, pass, s.options);
    s.calls.push_back(std::move(c));
  }
  return s;
}

// One sample; the workspace is the caller's and is not part of the time.
double sample(Subject& s) {
  double ms = 0;
  const MemoryWatch watch;
  s.flops = 0;
  for (Call& c : s.calls) {
    c.memory = io::allocate_tensor(DType::i64, {workspace_bytes(c.problem) / 8 + 1});
    const auto begin = Clock::now();
    run_call(s, c);
    ms += ms_since(begin);
    c.memory = {};
    s.flops += useful_flops(c.problem, c.last.chunk_tokens);
  }
  s.peak_bytes = std::max(s.peak_bytes, watch.peak_extra_bytes());
  return ms;
}

// product, subject, product, subject, ..: each subject stands between two limits.
std::vector<double> measure(Context& context, const Flags& f, std::vector<Subject>& subjects) {
  PlainProduct plain;
  std::vector<double> rates;
  Progress progress(context, "bench", static_cast<int64_t>(subjects.size()) * (f.repeats + 1),
                    "calls");
  for (int r = -1; r < f.repeats; ++r) {  // the first round warms up
    double before = plain.flops_per_ms();
    for (Subject& s : subjects) {
      check_interrupt();
      if (r == 0) s.peak_bytes = -1;
      const double ms = sample(s);
      const double after = plain.flops_per_ms();
      if (r >= 0) {
        s.ms.push_back(ms);
        s.ratios.push_back(ms * (before + after) / 2 / s.flops);
        rates.push_back(after);
      }
      before = after;
      progress.advance(1, s.name);
    }
  }
  return rates;
}

double middle(std::vector<double> values) { return time_stats(std::move(values)).median_ms; }

std::string case_name(const SizeFlags& s) {
  return fmt::format("B{} S{} H{} G{} N{} P{} R{}", s.batch, s.tokens, s.heads, s.groups,
                     s.state_dim, s.head_dim, s.rank);
}

nlohmann::json run_json(const Flags& f, const Subject& s) {
  int64_t declared = 0;
  for (const Call& c : s.calls) declared = std::max(declared, c.last.workspace_bytes);
  nlohmann::json j = {{"name", s.name},
                      {"lane", s.lane},
                      {"case", case_name(f.size)},
                      {"time", to_json(time_stats(s.ms))},
                      {"ratio", middle(s.ratios)},
                      {"declared_bytes", declared}};
  if (s.peak_bytes >= 0) j["extra_bytes"] = s.peak_bytes;
  return j;
}

void fill_receipt(Receipt& receipt, const Flags& f, const std::vector<Subject>& subjects,
                  double rate) {
  nlohmann::json runs = nlohmann::json::array();
  for (const Subject& s : subjects) {
    runs.push_back(run_json(f, s));
    for (const Call& c : s.calls) {
      mamba3::CallFacts facts;
      facts.problem = c.problem;
      facts.result = c.last;
      facts.measured_peak_extra_bytes = s.peak_bytes;
      if (memory_is_measured()) facts.measured_by = "every heap allocation of the process counted";
      if (s.calls.size() == 1) facts.time = time_stats(s.ms);
      facts.ratio_to_plain_product = middle(s.ratios);
      receipt.call(call_json(facts));
    }
  }
  receipt.section(
      "bench",
      {{"limit",
        fmt::format("useful flops at {:.4g} GFLOP/s, the rate of a 1024^3 fp32 product of "
                    "the same process (oneDNN {}, {}, {} threads), before and after each "
                    "sample",
                    rate * 1e-6, cpu::onednn_version(), cpu::onednn_isa(), omp_get_max_threads())},
       {"first", subjects.front().name},
       {"runs", runs}});
}

void print_people(const Flags& f, const std::vector<Subject>& subjects, double rate) {
  fmt::print("{}, {} samples each; the plain product runs at {:.4g} GFLOP/s\n\n", case_name(f.size),
             f.repeats, rate * 1e-6);
  Table table({"run", ">median", ">p20", ">p80", ">limit", ">x limit", ">extra memory"});
  const Subject* best = &subjects.front();
  for (const Subject& s : subjects) {
    const TimeStats t = time_stats(s.ms);
    table.row({s.name, human_ms(t.median_ms), human_ms(t.p20_ms), human_ms(t.p80_ms),
               human_ms(s.flops / rate), fmt::format("{:.2f}", middle(s.ratios)),
               human_bytes(s.peak_bytes)});
    if (middle(s.ratios) < middle(best->ratios)) best = &s;
  }
  table.print();
  fmt::print("\n");
  verdict(true, fmt::format("{}: {:.2f} x the useful flops at the rate of the plain product",
                            best->name, middle(best->ratios)));
}

void run(Context& context, const Flags& f) {
  require_other_file("--receipt", f.receipt, {});
  const SizeFlags& s = f.size;
  for (const auto& [flag, value] :
       {std::pair("--batch", s.batch), std::pair("--tokens", s.tokens),
        std::pair("--heads", s.heads), std::pair("--groups", s.groups),
        std::pair("--state-dim", s.state_dim), std::pair("--head-dim", s.head_dim)})
    require(value > 0, ErrorKind::usage, "{} {}: a benchmark needs one above 0", flag, value);
  // The plain product has no argument for its threads: both sides take OpenMP's number.
  if (f.options.threads > 0) omp_set_num_threads(f.options.threads);
  Receipt receipt(ReceiptKind::bench, provenance_of(context));
  std::vector<Drawn> data;
  std::vector<Subject> subjects;
  const auto dtypes = split(f.dtypes, ',');
  data.reserve(dtypes.size());
  for (const std::string& dtype : dtypes) {
    data.push_back(draw(s, parse_dtype(dtype), f.seed));
    for (const std::string& lane : split(f.lanes, ','))
      subjects.push_back(make_subject(f, lane, dtype, data.back()));
  }
  const double rate = middle(measure(context, f, subjects));
  fill_receipt(receipt, f, subjects, rate);
  receipt.title(fmt::format("Mamba-3 scan, {}", case_name(s))).verdict(Verdict::not_checked);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (context.jsonl)
    for (const Subject& one : subjects) fmt::print("{}\n", run_json(f, one).dump());
  if (!context.machine()) print_people(f, subjects, rate);
}

}  // namespace

void register_scan_bench(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"bench", "times lanes of the scan beside the plain product, interleaved in one process",
       "talea bench --operator mamba3 --tokens 256 --heads 4 --repeats 3", ""});
  f->size.add(*sub);
  sub->add_option("--dtype", f->dtypes, "one or more, parted by commas")->capture_default_str();
  sub->add_option("--lanes", f->lanes, "host lanes, parted by commas")->capture_default_str();
  sub->add_option("--pass", f->pass, "both: forward and backward, one behind the other")
      ->check(CLI::IsMember({"forward", "backward", "step", "both"}))
      ->capture_default_str();
  sub->add_option("--repeats", f->repeats, "samples a run")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  sub->add_option("--seed", f->seed, "of the data")->capture_default_str();
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  f->options.add(*sub, false);
  sub->callback([f, sub, &context] {
    if (f->pass == "step") f->options.drop_unread_of_step(context, *sub);
    blame_flags([&] { run(context, *f); });
  });
}

}  // namespace talea::cli
