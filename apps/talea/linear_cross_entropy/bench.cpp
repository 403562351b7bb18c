// What: `talea bench`: lanes against the three plain products, interleaved in one process; the host
// half, and the way to the device half.
// Why: a ratio means something only beside its limit, measured just before and just after.
// Never: compares with a number of another run.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "bench_device.hpp"
#include "call.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "core/receipt.hpp"
#include "device/cpu/onednn.hpp"
#include "io/receipt_file.hpp"
#include "memory.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "progress.hpp"
#include "record.hpp"
#include "table.hpp"
#include "yardsticks/linear_cross_entropy/lanes.hpp"

namespace talea::cli {
namespace {

using testing::host_lane;
using testing::is_device_lane;
using testing::is_reference_lane;
using testing::is_yardstick_lane;

struct Flags {
  OptionFlags options;
  ShardFlags ranks;
  ShapeFlags shape;
  std::string dtypes = "fp32", lanes, ignored = "0", runs_from, receipt;
  std::string limits, inputs, dw = "main_grad";
  double spread = 1;
  bool late_upstream = false, also_plain = false;
  std::vector<std::string> outputs = {"loss,dx,dw"};
  int repeats = 5;
  uint64_t seed = 1;
};

struct Data {
  io::HostTensor hidden, weight, targets;
};

uint64_t next(uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Uniform of variance 1 for hidden, 1 / hidden for the weight: logits of deviation about 1.
Data make_data(const ShapeFlags& s, DType dtype, double ignored, int64_t ignore_index,
               uint64_t seed) {
  Data d{io::allocate_tensor(dtype, {s.tokens, s.hidden}),
         io::allocate_tensor(dtype, {s.vocab, s.hidden}),
         io::allocate_tensor(DType::i64, {s.tokens})};
  uint64_t state = seed;
  auto fill = [&](const Tensor& t, double deviation) {
    for (int64_t i = 0; i < t.elements(); ++i)
      store_element(
          t.data, t.dtype, i,
          (static_cast<double>(next(state) >> 11) * 0x1p-53 - 0.5) * deviation * std::sqrt(12.0));
  };
  fill(d.hidden.view, 1);
  fill(d.weight.view, 1 / std::sqrt(static_cast<double>(std::max<int64_t>(s.hidden, 1))));
  auto* targets = static_cast<int64_t*>(d.targets.view.data);
  for (int64_t t = 0; t < s.tokens; ++t) {
    const double draw = static_cast<double>(next(state) >> 11) * 0x1p-53;
    const auto id = static_cast<int64_t>(next(state) % static_cast<uint64_t>(s.vocab));
    targets[t] = draw < ignored ? ignore_index : id;
  }
  return d;
}

// Logits, dX and dW by oneDNN in fp32: what nobody who computes all three can be faster than.
class PlainProducts {
 public:
  explicit PlainProducts(const ShapeFlags& s)
      : s_(s),
        x_(io::allocate_tensor(DType::f32, {s.tokens, s.hidden})),
        w_(io::allocate_tensor(DType::f32, {s.vocab, s.hidden})),
        z_(io::allocate_tensor(DType::f32, {s.tokens, s.vocab})),
        dx_(io::allocate_tensor(DType::f32, {s.tokens, s.hidden})),
        dw_(io::allocate_tensor(DType::f32, {s.vocab, s.hidden})) {
    for (int64_t i = 0; i < x_.view.elements(); ++i) at(x_)[i] = 0.25f;
    for (int64_t i = 0; i < w_.view.elements(); ++i) at(w_)[i] = 0.125f;
  }

  double run_ms(bool backward) {
    const auto begin = std::chrono::steady_clock::now();
    const int64_t n = s_.tokens, d = s_.hidden, v = s_.vocab;
    cpu::onednn_product({false, true, n, v, d, at(x_), d, at(w_), d, at(z_), v});
    if (backward) {
      cpu::onednn_product({false, false, n, d, v, at(z_), v, at(w_), d, at(dx_), d});
      cpu::onednn_product({true, false, v, d, n, at(z_), v, at(x_), d, at(dw_), d});
    }
    const auto end = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::milli>(end - begin).count();
  }

 private:
  static float* at(const io::HostTensor& t) { return static_cast<float*>(t.view.data); }
  ShapeFlags s_;
  io::HostTensor x_, w_, z_, dx_, dw_;
};

// One line of the table.
struct Subject {
  std::string name, case_name;
  LinearCrossEntropyOptions options;
  LinearCrossEntropyInputs in;
  HostOutputs out;
  MeasuredCall last;
  int64_t peak_bytes = -1;
  bool backward = true;
  std::vector<double> ms, ratios, to_first;  // a number a round
};

std::vector<std::string> wanted_lanes(const Flags& f) {
  const auto known = linear_cross_entropy_lanes();
  std::vector<std::string> lanes;
  if (f.lanes.empty()) {
    lanes.push_back(host_lane());
    if (f.ranks.ranks <= 1 && !under_mpirun())  // the comparison has no ranks
      std::copy_if(known.begin(), known.end(), std::back_inserter(lanes), is_yardstick_lane);
  } else {
    lanes = split(f.lanes, ',');
  }
  for (const std::string& lane : lanes) {
    require(std::find(known.begin(), known.end(), lane) != known.end(), ErrorKind::usage,
            "--lanes {}: no such lane", lane);
    require(!is_device_lane(lane), ErrorKind::usage,
            "--lanes {}: host and device lanes cannot stand in one run", lane);
  }
  return lanes;
}

struct Workload {
  std::vector<Data> data;
  std::vector<Subject> subjects;
};

// What the others are compared with keeps all it needs; the limit is of those others.
void lift_limit(Subject& s) {
  const int64_t given = s.options.workspace_limit_bytes;
  s.options.workspace_limit_bytes = std::numeric_limits<int64_t>::max();
  const int64_t needed = workspace_bytes(describe(s.in, s.out.views, s.options));
  constexpr int64_t beside = int64_t{1} << 20;  // more than a call takes beside its workspace
  s.options.workspace_limit_bytes = std::max(given, needed + beside);
}

Workload make_workload(const Flags& f) {
  Workload w;
  const auto dtypes = split(f.dtypes, ',');
  const auto fractions = split(f.ignored, ',');
  for (const std::string& dtype : dtypes)
    for (const std::string& fraction : fractions) {
      const double share = parse_number("--ignored-fraction", fraction);
      require(share >= 0 && share <= 1, ErrorKind::usage,
              "--ignored-fraction {}: must lie in [0, 1]", fraction);
      LinearCrossEntropyOptions options = f.options.options();
      w.data.push_back(make_data(f.shape, parse_dtype(dtype), share, options.ignore_index, f.seed));
      for (const std::string& outputs : f.outputs)
        for (const std::string& lane : wanted_lanes(f)) {
          Subject s;
          s.options = options;
          s.options.lane = lane;
          s.in.hidden = w.data.back().hidden.view;
          s.in.weight = w.data.back().weight.view;
          s.in.targets = w.data.back().targets.view;
          const Wanted wanted = parse_outputs(outputs);
          s.backward = wanted.dx || wanted.dw;
          s.out = allocate_outputs(wanted, s.in, options);
          if (is_yardstick_lane(lane) || is_reference_lane(lane)) lift_limit(s);
          s.name = fmt::format("{} {}{}{}", lane, dtype,
                               share > 0 ? fmt::format(" {:.0f} % ignored", 100 * share) : "",
                               f.outputs.size() > 1 ? " " + outputs : "");
          s.case_name = fmt::format("{}x{}x{}", f.shape.tokens, f.shape.hidden, f.shape.vocab);
          w.subjects.push_back(std::move(s));
        }
    }
  return w;
}

// products, subject, products, subject, ..., products: each subject stands between two limits.
std::vector<double> measure(Context& context, const Flags& f, Workload& w, PlainProducts& plain,
                            const ShardWorld& world) {
  const bool backward = w.subjects.empty() || w.subjects.front().backward;
  std::vector<double> limits;
  Progress progress(context, "bench", static_cast<int64_t>(w.subjects.size()) * (f.repeats + 1),
                    "calls");
  for (int r = -1; r < f.repeats; ++r) {  // the first round warms up
    double before = plain.run_ms(backward);
    for (Subject& s : w.subjects) {
      check_interrupt();
      s.last = measured_call({s.in, s.out.views, s.options, f.ranks.sequence_parallel}, world);
      const double after = plain.run_ms(backward);
      // Libraries build their kernels once, in the warm-up; a step pays what later calls show.
      if (r >= 0) {
        s.peak_bytes = std::max(s.peak_bytes, s.last.peak_extra_bytes);
        s.ms.push_back(s.last.ms);
        s.ratios.push_back(2 * s.last.ms / (before + after));
        limits.push_back(after);
      }
      before = after;
      progress.advance(1, s.name);
    }
    for (Subject& s : w.subjects)
      if (r >= 0) s.to_first.push_back(s.ms.back() / w.subjects.front().ms.back());
  }
  return limits;
}

double middle(std::vector<double> values) { return time_stats(std::move(values)).median_ms; }

nlohmann::json run_json(const Subject& s) {
  nlohmann::json j = {{"name", s.name},
                      {"lane", s.options.lane},
                      {"case", s.case_name},
                      {"time", to_json(time_stats(s.ms))},
                      {"ratio", middle(s.ratios)},
                      {"ratio_to_first", middle(s.to_first)},
                      {"declared_bytes", s.last.result.workspace_bytes}};
  if (s.peak_bytes >= 0) j["extra_bytes"] = s.peak_bytes;
  return j;
}

void fill_receipt(Receipt& receipt, const Workload& w, const std::vector<double>& limits,
                  const ShardWorld& world) {
  nlohmann::json runs = nlohmann::json::array();
  const bool backward = w.subjects.front().backward;
  runs.push_back({{"name", backward ? "three plain products" : "one plain product"},
                  {"case", w.subjects.front().case_name},
                  {"time", to_json(time_stats(limits))},
                  {"ratio", 1.0}});
  for (const Subject& s : w.subjects) {
    runs.push_back(run_json(s));
    lce::CallFacts facts;
    facts.problem = s.last.problem;
    facts.result = s.last.result;
    facts.measured_peak_extra_bytes = s.peak_bytes;
    if (memory_is_measured()) facts.measured_by = "every heap allocation of the process counted";
    facts.full_logits_measured = s.last.full_logits_excluded() || s.last.result.full_logits_tensor;
    facts.time = time_stats(s.ms);
    facts.ratio_to_plain_products = middle(s.ratios);
    if (world.size() > 1) add_ranks(world, s.last.ranks, facts);
    receipt.call(lce::call_json(facts));
  }
  receipt.section(
      "bench",
      {{"limit", fmt::format("{} of the same process in fp32 (oneDNN {}, {}, {} threads), "
                             "before and after each sample",
                             backward ? "the three plain products" : "the logits product",
                             cpu::onednn_version(), cpu::onednn_isa(), omp_get_max_threads())},
       {"first", w.subjects.front().name},
       {"runs", runs}});
}

void print_people(const Flags& f, const Workload& w, const std::vector<double>& limits) {
  fmt::print("{} tokens, hidden {}, vocabulary {}, {} samples each\n\n", grouped(f.shape.tokens),
             grouped(f.shape.hidden), grouped(f.shape.vocab), f.repeats);
  Table table(
      {"run", ">median", ">p20", ">p80", ">x products", ">x first", ">extra memory", ">declared"});
  const TimeStats limit = time_stats(limits);
  table.row({w.subjects.front().backward ? "three plain products" : "one plain product",
             human_ms(limit.median_ms), human_ms(limit.p20_ms), human_ms(limit.p80_ms), "1.00", "",
             "", ""});
  const Subject* best = &w.subjects.front();
  for (const Subject& s : w.subjects) {
    const TimeStats t = time_stats(s.ms);
    table.row({s.name, human_ms(t.median_ms), human_ms(t.p20_ms), human_ms(t.p80_ms),
               fmt::format("{:.2f}", middle(s.ratios)), fmt::format("{:.2f}", middle(s.to_first)),
               human_bytes(s.peak_bytes), human_bytes(s.last.result.workspace_bytes)});
    if (middle(s.ratios) < middle(best->ratios)) best = &s;
  }
  table.print();
  fmt::print("\n");
  verdict(true, fmt::format("{}: {:.2f} x the plain products", best->name, middle(best->ratios)));
}

void run_on_device(Context& context, const Flags& f, const std::vector<std::string>& lanes) {
  for (const std::string& lane : lanes)
    require(is_device_lane(lane), ErrorKind::usage,
            "--lanes {}: host and device lanes cannot stand in one run", lane);
  require(f.outputs.size() == 1, ErrorKind::usage, "--outputs: once, with device lanes");
  DeviceBench b;
  b.options = f.options;
  b.shape = f.shape;
  b.dtype = f.dtypes;
  b.outputs = f.outputs.front();
  b.receipt = f.receipt;
  b.lanes = lanes;
  b.limits = split(!f.limits.empty()                     ? f.limits
                   : f.options.workspace_limit == "auto" ? "256MiB"
                                                         : f.options.workspace_limit,
                   ',');
  if (!f.inputs.empty()) b.inputs = split(f.inputs, ',');
  b.dw = f.dw;
  b.late_upstream = f.late_upstream;
  b.also_plain = f.also_plain;
  b.ignored = parse_number("--ignored-fraction", f.ignored);
  b.spread = f.spread;
  b.repeats = f.repeats;
  b.seed = f.seed;
  run_device_bench(context, b);
}

void refuse_unread_of(const Context& context, const CLI::App& sub, const Flags& f) {
  if (!f.runs_from.empty())
    return refuse_others(sub, {"--runs-from", "--receipt"}, "--runs-from times nothing");
  Wanted all;  // of any run
  for (const std::string& outputs : f.outputs) {
    const Wanted w = parse_outputs(outputs);
    all.loss |= w.loss, all.dx |= w.dx, all.dw |= w.dw, all.db |= w.db;
  }
  check_unread_options(context, sub, all, f.options.values.reduction);
  if (!is_device_lane(split(f.lanes, ',').front())) return;
  refuse_unread(
      sub, {"--ranks", "--sequence-parallel", "--dx-sum", "--rank-timeout", "--threads", "--isa"},
      "of host lanes");
  if (!f.limits.empty()) refuse_unread(sub, {"--workspace-limit"}, "--limits has the limits");
  if (!all.dw) refuse_unread(sub, {"--dw"}, "needs dw among --outputs");
}

void run(Context& context, const Flags& f) {
  require_other_file("--receipt", f.receipt, {f.runs_from});
  if (!f.runs_from.empty()) return record(context, ReceiptKind::bench, f.runs_from, f.receipt);
  require(f.options.values.lane == "auto", ErrorKind::usage,
          "--lane {}: here the lanes are --lanes", f.options.values.lane);
  require(f.shape.tokens > 0 && f.shape.hidden > 0 && f.shape.vocab > 0, ErrorKind::usage,
          "--tokens {} --hidden {} --vocab {}: a benchmark needs all above 0", f.shape.tokens,
          f.shape.hidden, f.shape.vocab);
  if (const auto lanes = split(f.lanes, ','); is_device_lane(lanes.front()))
    return run_on_device(context, f, lanes);
  for (const auto& [flag, given] :
       {std::pair("--limits", !f.limits.empty()), std::pair("--inputs", !f.inputs.empty()),
        std::pair("--dw", f.dw != "main_grad"), std::pair("--late-upstream", f.late_upstream),
        std::pair("--also-plain", f.also_plain), std::pair("--spread", f.spread != 1)})
    require(!given, ErrorKind::usage, "{}: of device lanes only (--lanes; talea doctor lists them)",
            flag);
  // The plain products have no argument for their threads: both sides take OpenMP's number.
  if (f.options.values.threads > 0) omp_set_num_threads(f.options.values.threads);
  const ShardWorld world(f.ranks);
  for (const std::string& lane : split(f.lanes, ','))
    require(world.size() == 1 || !is_yardstick_lane(lane), ErrorKind::usage,
            "--lanes {}: lane {} has no ranks", f.lanes, lane);
  Receipt receipt(ReceiptKind::bench, provenance_of(context));
  Workload w = make_workload(f);
  PlainProducts plain(f.shape);
  const std::vector<double> limits = measure(context, f, w, plain, world);
  if (!world.speaks()) return;
  fill_receipt(receipt, w, limits, world);
  receipt.title(fmt::format("Linear cross-entropy, {} tokens, hidden {}, vocabulary {}",
                            f.shape.tokens, f.shape.hidden, f.shape.vocab));
  receipt.verdict(Verdict::not_checked);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (context.jsonl)
    for (const Subject& s : w.subjects) fmt::print("{}\n", run_json(s).dump());
  if (!context.machine()) print_people(f, w, limits);
}

}  // namespace

void register_bench(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"bench", "times lanes against the plain products, interleaved in one process",
       "talea bench --tokens 256 --hidden 256 --vocab 8000 --dtype fp32 --repeats 3", ""});
  f->shape.add(*sub);
  sub->add_option("--dtype", f->dtypes, "one or more, parted by commas")->capture_default_str();
  sub->add_option("--lanes", f->lanes,
                  "host lanes or device lanes, parted by commas; default cpu,unfused");
  sub->add_option("--limits", f->limits,
                  "device lanes: workspace limits, parted by commas; each lane runs at each");
  sub->add_option("--inputs", f->inputs,
                  "device lanes: of bias, token_weight, upstream, parted by commas");
  sub->add_option("--dw", f->dw, "device lanes: what dW is: added into fp32, or returned")
      ->check(CLI::IsMember({"main_grad", "fp32", "weight"}))
      ->capture_default_str();
  sub->add_flag("--late-upstream", f->late_upstream,
                "device lanes: the loss first, then a second call with upstream and gradients");
  sub->add_flag(
      "--also-plain", f->also_plain,
      "device lanes: beside each run the same lane's mean loss of every token, no option");
  sub->add_option("--spread", f->spread, "device lanes: standard deviation of the logits")
      ->capture_default_str();
  sub->add_option("--ignored-fraction", f->ignored, "one or more, parted by commas")
      ->capture_default_str();
  sub->add_option("--outputs", f->outputs, "as of loss; give it again for another run beside it")
      ->capture_default_str();
  sub->add_option("--repeats", f->repeats, "samples a run")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  sub->add_option("--seed", f->seed, "of the data")->capture_default_str();
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->add_option("--runs-from", f->runs_from,
                  "no timing: the receipt of runs that another program measured, .json");
  f->options.add(*sub, false);
  f->ranks.add(*sub);
  f->ranks.add_dx_sum(*sub);
  sub->callback([f, sub, &context] {
    refuse_unread_of(context, *sub, *f);
    run(context, *f);
  });
}

}  // namespace talea::cli
