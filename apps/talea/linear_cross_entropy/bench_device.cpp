// What: device lanes against the three plain cuBLASLt products, interleaved in one process.
// Why: the chip is power-limited and its clock drifts; only a ratio of neighbours means something.
// Never: includes a CUDA header; the device session knows the runtime.
#include "bench_device.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "bench_data.hpp"
#include "core/fail.hpp"
#include "core/receipt.hpp"
#include "io/receipt_file.hpp"
#include "on_device.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "progress.hpp"
#include "table.hpp"

namespace talea::cli {
namespace {

constexpr int warm_rounds = 2;  // libraries load their kernels; then a call is timed by itself
constexpr double mib = 0x1p20;

// Everything that one lane at one limit needs.
struct Subject {
  std::string name;
  bool plain = false;  // the mean loss alone, which the subject before it is compared with
  LinearCrossEntropyOptions options;
  LinearCrossEntropyOutputs first, out;  // first: of the call before a late upstream
  int64_t saved_bytes = 0;               // what that call leaves for the second
  Workspace workspace;
  LinearCrossEntropyProblem problem;
  LinearCrossEntropyResult result;
  int64_t hidden_bytes = 0;  // device memory that the call itself took: must be 0
  int calls = 1;             // of a sample, back to back
  std::vector<double> ms, ratios, to_plain;

  int64_t extra_bytes() const { return workspace.bytes + hidden_bytes + saved_bytes; }
};

std::string name_of_subject(const DeviceBench& b, const std::string& lane, int64_t limit) {
  std::string name = fmt::format("{} {} MiB", lane, limit >> 20);
  if (b.dw == "weight" && b.outputs.find("dw") != std::string::npos) name += ", dW " + b.dtype;
  if (b.late_upstream) name += ", upstream known late";
  return name;
}

Subject make_subject(DeviceSession& session, Data& data, const DeviceBench& b,
                     const std::string& lane, const std::string& limit) {
  Subject s;
  s.options = b.options.options();
  s.options.lane = lane;
  s.options.workspace_limit_bytes = parse_bytes("--limits", limit);
  s.name = name_of_subject(b, lane, s.options.workspace_limit_bytes);
  s.out = data.outputs();
  LinearCrossEntropyInputs second = data.in;
  if (b.late_upstream) {  // the first call sees no upstream and gives the loss and the row states
    s.first.loss = s.out.loss;
    s.out.loss = {};
    second.saved_lse = s.first.lse = data.per_token();
    second.saved_target_logprob = s.first.target_logprob = data.per_token();
    s.saved_bytes = 2 * b.shape.tokens * size_of(DType::f32);
  }
  s.problem = describe(second, s.out, s.options);
  s.workspace.bytes = workspace_bytes(s.problem);
  if (b.late_upstream) {
    LinearCrossEntropyInputs in = data.in;
    in.upstream = {};
    s.workspace.bytes =
        std::max(s.workspace.bytes, workspace_bytes(describe(in, s.first, s.options)));
  }
  s.workspace.data = session.allocate(s.workspace.bytes);
  return s;
}

// The same lane under the same limit with nothing asked for but the mean loss and its gradients.
Subject plain_beside(DeviceSession& session, Data& data, const Subject& other) {
  Subject s;
  s.plain = true;
  s.name = other.name + ", mean loss alone";
  s.options.lane = other.options.lane;
  s.options.workspace_limit_bytes = other.options.workspace_limit_bytes;
  s.out = data.plain_outputs();
  s.problem = describe(data.plain_in, s.out, s.options);
  s.workspace.bytes = workspace_bytes(s.problem);
  s.workspace.data = session.allocate(s.workspace.bytes);
  return s;
}

double subject_ms(DeviceSession& session, Data& data, const DeviceBench& b, Subject& s) {
  if (s.plain)
    return data.call_ms(s.calls, [&] {
      s.result =
          linear_cross_entropy(data.plain_in, s.out, s.options, s.workspace, {}, session.stream());
    });
  LinearCrossEntropyInputs first = data.in, second = data.in;
  first.upstream = {};
  second.saved_lse = s.first.lse;
  second.saved_target_logprob = s.first.target_logprob;
  return data.call_ms(s.calls, [&] {
    if (b.late_upstream)
      linear_cross_entropy(first, s.first, s.options, s.workspace, {}, session.stream());
    s.result = linear_cross_entropy(second, s.out, s.options, s.workspace, {}, session.stream());
  });
}

struct Measured {
  std::vector<Subject> subjects;
  std::vector<double> limits;
  int limit_calls = 1;               // of a sample of the products
  std::vector<DeviceClocks> clocks;  // read just after a sample, before the chip has rested
};

// products, subject, products, subject, ..., products: each subject stands between two limits.
void measure(Context& context, DeviceSession& session, Data& data, const DeviceBench& b,
             Measured& m) {
  const int rounds = warm_rounds + b.repeats;
  Progress progress(context, "bench", static_cast<int64_t>(m.subjects.size()) * rounds, "calls");
  for (int r = 0; r < rounds; ++r) {
    double before = data.plain_ms(m.limit_calls);
    if (r == warm_rounds - 1) m.limit_calls = calls_per_sample(before);
    for (size_t i = 0; i < m.subjects.size(); ++i) {
      Subject& s = m.subjects[i];
      check_interrupt();
      const int64_t free = session.free_bytes();
      const double ms = subject_ms(session, data, b, s);
      if (r == warm_rounds - 1) s.calls = calls_per_sample(ms);
      const double after = data.plain_ms(m.limit_calls);
      if (r >= warm_rounds) {
        s.hidden_bytes = std::max(s.hidden_bytes, free - session.free_bytes());
        s.ms.push_back(ms);
        s.ratios.push_back(2 * ms / (before + after));
        if (s.plain) m.subjects[i - 1].to_plain.push_back(m.subjects[i - 1].ms.back() / ms);
        m.limits.push_back(after);
        m.clocks.push_back(session.clocks());
      }
      before = after;
      progress.advance(1, s.name);
    }
  }
}

double middle(std::vector<double> values) { return time_stats(std::move(values)).median_ms; }

nlohmann::json run_json(const DeviceBench& b, const Subject& s, const std::string& shape) {
  const TimeStats ratio = time_stats(s.ratios), time = time_stats(s.ms);
  const double work = static_cast<double>(b.shape.tokens) * static_cast<double>(b.shape.hidden) *
                      static_cast<double>(b.shape.vocab);
  nlohmann::json j = {
      {"name", s.name},
      {"lane", s.options.lane},
      {"case", shape},
      {"time", to_json(time)},  // of a call
      {"calls_per_sample", s.calls},
      {"femtoseconds_per_element", time.median_ms * 1e12 / work},  // tokens x hidden x vocab
      {"ratio", ratio.median_ms},
      {"ratio_p20", ratio.p20_ms},
      {"ratio_p80", ratio.p80_ms},
      {"extra_bytes", s.extra_bytes()},
      {"extra_mib", static_cast<double>(s.extra_bytes()) / mib},
      {"declared_bytes", s.workspace.bytes},
      {"limit_bytes", s.options.workspace_limit_bytes},
      {"chunk_rows", s.result.chunk_rows},
      {"chunks", s.result.chunks},
      {"outputs", b.outputs},
      {"dw", b.outputs.find("dw") == std::string::npos ? "not wanted" : b.dw}};
  if (s.plain) j["outputs"] = "loss and gradients";
  if (!s.to_plain.empty()) j["ratio_to_mean_loss_alone"] = time_stats(s.to_plain).median_ms;
  return j;
}

nlohmann::json spread_of(const std::vector<DeviceClocks>& all,
                         double (*read)(const DeviceClocks&)) {
  std::vector<double> values;
  for (const DeviceClocks& c : all) values.push_back(read(c));
  std::sort(values.begin(), values.end());
  return {
      {"least", values.front()}, {"median", values[values.size() / 2]}, {"most", values.back()}};
}

nlohmann::json clocks_json(const std::vector<DeviceClocks>& all) {
  std::map<std::string, int> reasons;
  for (const DeviceClocks& c : all) ++reasons[c.throttle_reasons];
  return {
      {"sm_mhz", spread_of(all, [](const DeviceClocks& c) { return double(c.sm_mhz); })},
      {"memory_mhz", spread_of(all, [](const DeviceClocks& c) { return double(c.memory_mhz); })},
      {"power_watts", spread_of(all, [](const DeviceClocks& c) { return c.power_watts; })},
      {"temperature_c",
       spread_of(all, [](const DeviceClocks& c) { return double(c.temperature_c); })},
      {"power_limit_watts", all.back().power_limit_watts},
      {"throttle_reasons", reasons},
      {"read", "after each sample"}};
}

Receipt make_receipt(DeviceSession& session, Data& data, Provenance provenance,
                     const DeviceBench& b, const Measured& m) {
  provenance.device = device_provenance(session, m.clocks);
  Receipt receipt(ReceiptKind::bench, provenance);
  const std::string shape = fmt::format("{}x{}x{}", b.shape.tokens, b.shape.hidden, b.shape.vocab);
  const char* limit = data.backward() ? "three plain products" : "one plain product";
  nlohmann::json runs = nlohmann::json::array();
  runs.push_back({{"name", limit},
                  {"case", shape},
                  {"time", to_json(time_stats(m.limits))},
                  {"calls_per_sample", m.limit_calls},
                  {"ratio", 1.0}});
  const double weight_bytes =
      static_cast<double>(b.shape.vocab * b.shape.hidden * size_of(parse_dtype(b.dtype)));
  const double copy = data.copy_bytes_per_second();
  for (const Subject& s : m.subjects) {
    runs.push_back(run_json(b, s, shape));
    if (!data.backward())  // few tokens: one read of the weight at the speed of a copy is the floor
      runs.back()["weight_read_share_of_copy"] = weight_bytes / (middle(s.ms) / 1e3) / copy;
    lce::CallFacts facts;
    facts.problem = s.problem;
    facts.result = s.result;
    facts.seed = static_cast<int64_t>(b.seed);
    facts.measured_peak_extra_bytes = s.extra_bytes();
    facts.measured_by =
        "the workspace given, what an earlier call left for this one, and the device's free memory "
        "before and after calls";
    facts.full_logits_measured =
        static_cast<double>(facts.measured_peak_extra_bytes) <
        2.0 * static_cast<double>(b.shape.tokens) * static_cast<double>(b.shape.vocab);
    facts.time = time_stats(s.ms);
    facts.ratio_to_plain_products = middle(s.ratios);
    receipt.call(lce::call_json(facts));
  }
  receipt.section(
      "bench",
      {{"limit", fmt::format("{} in {} (cuBLASLt's first choice, 32 MiB of workspace), of the "
                             "same process, before and after each sample; short calls are timed "
                             "several at once, back to back: calls_per_sample",
                             limit, b.dtype)},
       {"copy_bytes_per_second", copy},
       {"spread_of_logits", b.spread},
       {"ignored_share", b.ignored},
       {"inputs", b.inputs},
       {"clocks", clocks_json(m.clocks)},
       {"runs", runs}});
  receipt.title(fmt::format("Linear cross-entropy on {}: {} tokens, hidden {}, vocabulary {}, {}",
                            session.name(), b.shape.tokens, b.shape.hidden, b.shape.vocab,
                            b.outputs));
  receipt.verdict(Verdict::not_checked);
  return receipt;
}

void print_people(const DeviceBench& b, const Measured& m) {
  fmt::print("{} tokens, hidden {}, vocabulary {}, {}, {} samples each\n\n",
             grouped(b.shape.tokens), grouped(b.shape.hidden), grouped(b.shape.vocab), b.outputs,
             b.repeats);
  Table table({"run", ">median", ">p20", ">p80", ">x products", ">x mean loss", ">extra memory",
               ">chunks"});
  const TimeStats limit = time_stats(m.limits);
  table.row({"plain products", human_ms(limit.median_ms), human_ms(limit.p20_ms),
             human_ms(limit.p80_ms), "1.000", "", "", ""});
  for (const Subject& s : m.subjects) {
    const TimeStats t = time_stats(s.ms);
    table.row({s.name, human_ms(t.median_ms), human_ms(t.p20_ms), human_ms(t.p80_ms),
               fmt::format("{:.3f}", middle(s.ratios)),
               s.to_plain.empty() ? "" : fmt::format("{:.3f}", middle(s.to_plain)),
               human_bytes(s.extra_bytes()), fmt::format("{}", s.result.chunks)});
  }
  table.print();
}

}  // namespace

void run_device_bench(Context& context, const DeviceBench& b) {
  std::string why;
  const std::unique_ptr<DeviceSession> session = DeviceSession::open(0, why);
  require(session != nullptr, ErrorKind::unavailable, "--lanes: a device lane, but {}", why);
  for (const std::string& input : b.inputs)
    require(input == "bias" || input == "token_weight" || input == "upstream", ErrorKind::usage,
            "--inputs {}: one of bias, token_weight, upstream", input);
  const Provenance provenance = provenance_of(context);
  Data data(*session, b);
  Measured m;
  for (const std::string& lane : b.lanes)
    for (const std::string& limit : b.limits) {
      m.subjects.push_back(make_subject(*session, data, b, lane, limit));
      if (b.also_plain) m.subjects.push_back(plain_beside(*session, data, m.subjects.back()));
    }
  measure(context, *session, data, b, m);
  const Receipt receipt = make_receipt(*session, data, provenance, b, m);
  if (!b.receipt.empty()) io::write_receipt(b.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (context.jsonl)
    for (const Subject& s : m.subjects) fmt::print("{}\n", run_json(b, s, "").dump());
  if (!context.machine()) print_people(b, m);
}

}  // namespace talea::cli
