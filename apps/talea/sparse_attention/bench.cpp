// What: `talea bench --operator sparse_attention`: a pass beside plain oneDNN products of as many
//       terms, interleaved in one process.
// Why: a ratio means something only beside its limit, measured just before and just after.
// Never: compares with a number of another run.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "../memory.hpp"
#include "../progress.hpp"
#include "../table.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "device/cpu/onednn.hpp"
#include "io/host_tensor.hpp"
#include "io/receipt_file.hpp"
#include "sizes.hpp"

namespace talea::cli {
namespace {

struct Flags {
  SparseSizes sizes;
  std::string dtypes = "fp32", lanes = "cpu", receipt;
  int repeats = 5, threads = 0;
  uint64_t seed = 1;
};

uint64_t next(uint64_t& state) {
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Memory for each tensor; floating ones uniform of variance 1.
struct Memory {
  std::vector<io::HostTensor> owners;
  uint64_t state;

  Place place() {
    return [this](DType dtype, std::initializer_list<int64_t> shape) {
      owners.push_back(io::allocate_tensor(dtype, shape));
      const Tensor t = owners.back().view;
      for (int64_t i = 0; is_floating(dtype) && i < t.elements(); ++i)
        store_element(t.data, dtype, i,
                      (static_cast<double>(next(state) >> 11) * 0x1p-53 - 0.5) * std::sqrt(12.0));
      return t;
    };
  }
};

// Lists of distinct keys, ascending, another one for every query.
void fill_lists(const Tensor& indices, int64_t keys, uint64_t& state) {
  const int64_t rows = indices.shape[0], slots = indices.shape[1];
  auto* at = static_cast<int32_t*>(indices.data);
  for (int64_t s = 0; s < rows; ++s)
    for (int64_t k = 0, j = -1; k < slots; ++k) {
      const int64_t left = std::max<int64_t>(keys - 1 - j - (slots - 1 - k), 1);
      const int64_t step = std::max<int64_t>(2 * left / (slots - k), 1);
      j += 1 + static_cast<int64_t>(next(state) % static_cast<uint64_t>(std::min(step, left)));
      at[s * slots + k] = j < keys ? static_cast<int32_t>(j) : -1;
    }
}

struct Product {
  bool transpose_a, transpose_b;
  int64_t m, n, k;  // over all queries
};

// As many terms as the pass has, over slots that all are valid, as a few large products.
std::vector<Product> products_of(const SparseSizes& z) {
  const int64_t rows = z.tokens * z.heads, k = z.top_k, d = z.dim, v = z.value_dim;
  if (z.pass == "forward") return {{false, true, rows, k, d}, {false, false, rows, v, k}};
  if (z.pass == "backward")
    return {{false, true, rows, k, d},
            {false, true, rows, k, v},
            {false, false, rows, d, k},
            {true, false, k, d, rows},
            {true, false, k, v, rows}};
  const int64_t index_rows = z.tokens * z.index_heads;
  if (z.pass == "select") return {{false, true, index_rows, z.keys, z.index_dim}};
  return {{false, true, rows, k, d},
          {false, true, index_rows, k, z.index_dim},
          {false, false, index_rows, z.index_dim, k},
          {true, false, k, z.index_dim, index_rows}};
}

class PlainProducts {
 public:
  explicit PlainProducts(const SparseSizes& z) : products_(products_of(z)) {
    int64_t largest = 0;
    for (Product& p : products_) {
      // Rows in chunks, so that no whole score tensor is needed for the limit either.
      int64_t& rows = p.transpose_a ? p.k : p.m;
      const int64_t most =
          std::max<int64_t>((int64_t{1} << 24) / std::max(p.n, p.transpose_a ? p.m : p.k), 64);
      chunks_.push_back({rows, std::min(rows, most)});
      rows = chunks_.back().second;
      largest = std::max({largest, p.m * p.k, p.k * p.n, p.m * p.n});
    }
    for (io::HostTensor* t : {&a_, &b_, &c_}) {
      *t = io::allocate_tensor(DType::f32, {largest});
      std::fill_n(static_cast<float*>(t->view.data), largest, 0.25f);
    }
  }

  double run_ms() {
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < products_.size(); ++i) {
      Product p = products_[i];
      for (int64_t done = 0; done < chunks_[i].first; done += chunks_[i].second) {
        (p.transpose_a ? p.k : p.m) = std::min(chunks_[i].second, chunks_[i].first - done);
        cpu::onednn_product({p.transpose_a, p.transpose_b, p.m, p.n, p.k, at(a_),
                             p.transpose_a ? p.m : p.k, at(b_), p.transpose_b ? p.k : p.n, at(c_),
                             p.n});
      }
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
        .count();
  }

 private:
  static float* at(const io::HostTensor& t) { return static_cast<float*>(t.view.data); }
  std::vector<Product> products_;
  std::vector<std::pair<int64_t, int64_t>> chunks_;  // rows in all, rows of one
  io::HostTensor a_, b_, c_;
};

struct Subject {
  std::string name, lane;
  SparseTensors tensors;
  io::HostTensor space;
  sa::Problem problem;
  sa::Result result;
  int64_t bytes = 0, peak = -1;
  std::vector<double> ms, ratios;
};

// One call with a workspace made for it, as a step makes it.
double run_ms(Subject& s) {
  const MemoryWatch watch;
  const io::HostTensor space = io::allocate_tensor(DType::u8, {s.bytes});
  const auto begin = std::chrono::steady_clock::now();
  s.result = s.tensors.run({space.view.data, s.bytes});
  const auto end = std::chrono::steady_clock::now();
  s.peak = std::max(s.peak, watch.peak_extra_bytes());
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

std::vector<Subject> subjects_of(const Flags& f, Memory& memory) {
  std::vector<Subject> all;
  const auto known = sa::lanes();
  for (const std::string& dtype : split(f.dtypes, ','))
    for (const std::string& lane : split(f.lanes, ',')) {
      require(std::find(known.begin(), known.end(), lane) != known.end(), ErrorKind::usage,
              "--lanes {}: no such lane; one of {}", lane, fmt::join(known, ", "));
      Subject s;
      SparseSizes z = f.sizes;
      z.dtype = dtype;
      s.lane = lane;
      s.name = lane + " " + dtype;
      s.tensors = tensors_of(z, lane, memory.place());
      for (const Tensor& t : {s.tensors.attention.in.indices, s.tensors.loss.in.indices})
        if (t) fill_lists(t, z.keys, memory.state);
      s.tensors.attention.options.threads = f.threads;
      s.tensors.select.options.threads = f.threads;
      s.tensors.loss.options.threads = f.threads;
      s.problem = s.tensors.problem();
      s.bytes = sa::workspace_bytes(s.problem);
      all.push_back(std::move(s));
    }
  return all;
}

// What backward saves from is a forward of the same lane.
void prepare(Subject& s) {
  if (s.tensors.pass != sa::Pass::backward) return;
  WholeAttention ahead = s.tensors.attention;
  ahead.out = {};
  ahead.out.o = ahead.in.o;
  ahead.out.lse = ahead.in.lse;
  ahead.in.o = ahead.in.lse = ahead.in.d_o = {};
  SparseTensors forward;
  forward.attention = ahead;
  forward.pass = sa::Pass::forward;
  const int64_t bytes = sa::workspace_bytes(forward.problem());
  const io::HostTensor space = io::allocate_tensor(DType::u8, {bytes});
  forward.run({space.view.data, bytes});
}

std::vector<double> measure(Context& context, const Flags& f, std::vector<Subject>& all,
                            PlainProducts& plain) {
  std::vector<double> limits;
  Progress progress(context, "bench", static_cast<int64_t>(all.size()) * (f.repeats + 1), "calls");
  for (Subject& s : all) prepare(s);
  for (int r = -1; r < f.repeats; ++r) {  // the first round warms up
    double before = plain.run_ms();
    for (Subject& s : all) {
      check_interrupt();
      if (r == 0) s.peak = -1;
      const double ms = run_ms(s), after = plain.run_ms();
      if (r >= 0) {
        s.ms.push_back(ms);
        s.ratios.push_back(2 * ms / (before + after));
        limits.push_back(after);
      }
      before = after;
      progress.advance(1, s.name);
    }
  }
  return limits;
}

double middle(std::vector<double> values) { return time_stats(std::move(values)).median_ms; }

nlohmann::json run_json(const Subject& s, const std::string& of_case) {
  nlohmann::json j = {{"name", s.name},
                      {"lane", s.lane},
                      {"case", of_case},
                      {"time", to_json(time_stats(s.ms))},
                      {"ratio", middle(s.ratios)},
                      {"declared_bytes", s.bytes}};
  if (s.peak >= 0) j["extra_bytes"] = s.peak;
  return j;
}

std::string case_of(const SparseSizes& z) {
  if (z.pass == "select")
    return fmt::format("select S {} S_kv {} Hi {} di {} K {}", z.tokens, z.keys, z.index_heads,
                       z.index_dim, z.top_k);
  return fmt::format("{} S {} S_kv {} H {} K {} {}/{}", z.pass, z.tokens, z.keys, z.heads, z.top_k,
                     z.dim, z.value_dim);
}

void run(Context& context, const Flags& f) {
  require_other_file("--receipt", f.receipt, {});
  const SparseSizes& z = f.sizes;
  require(z.tokens > 0 && z.keys > 0 && z.heads > 0 && z.top_k > 0, ErrorKind::usage,
          "--tokens {} --keys {} --heads {} --top-k {}: a benchmark needs all above 0", z.tokens,
          z.keys, z.heads, z.top_k);
  if (f.threads > 0) omp_set_num_threads(f.threads);  // of the products, too
  Receipt receipt(ReceiptKind::bench, provenance_of(context));
  Memory memory{{}, f.seed};
  std::vector<Subject> all = subjects_of(f, memory);
  PlainProducts plain(z);
  const std::vector<double> limits = measure(context, f, all, plain);
  const std::string of_case = case_of(z);
  nlohmann::json runs = nlohmann::json::array();
  runs.push_back({{"name", "plain products"},
                  {"case", of_case},
                  {"time", to_json(time_stats(limits))},
                  {"ratio", 1.0}});
  for (const Subject& s : all) {
    runs.push_back(run_json(s, of_case));
    sa::CallFacts facts;
    facts.problem = s.problem;
    facts.result = s.result;
    facts.measured_peak_extra_bytes = s.peak;
    if (memory_is_measured()) facts.measured_by = "every heap allocation of the process counted";
    facts.time = time_stats(s.ms);
    facts.ratio_to_plain_products = middle(s.ratios);
    receipt.call(sa::call_json(facts));
  }
  receipt.section("bench", {{"limit", fmt::format("plain products of as many terms, fp32 (oneDNN "
                                                  "{}, {}, {} threads), before and after each "
                                                  "sample",
                                                  cpu::onednn_version(), cpu::onednn_isa(),
                                                  omp_get_max_threads())},
                            {"runs", runs}});
  receipt.title("Sparse attention, " + of_case).verdict(Verdict::not_checked);
  if (!f.receipt.empty()) io::write_receipt(f.receipt, receipt);
  if (context.json) fmt::print("{}\n", receipt.text());
  if (context.jsonl)
    for (const Subject& s : all) fmt::print("{}\n", run_json(s, of_case).dump());
  if (context.machine()) return;
  fmt::print("{}, {} samples each\n\n", of_case, f.repeats);
  Table table({"run", ">median", ">p20", ">p80", ">x products", ">extra memory", ">declared"});
  const auto row = [&](const std::string& name, const TimeStats& t, double ratio, int64_t peak,
                       int64_t bytes) {
    table.row({name, human_ms(t.median_ms), human_ms(t.p20_ms), human_ms(t.p80_ms),
               fmt::format("{:.2f}", ratio), human_bytes(peak), human_bytes(bytes)});
  };
  row("plain products", time_stats(limits), 1, 0, 0);
  for (const Subject& s : all) row(s.name, time_stats(s.ms), middle(s.ratios), s.peak, s.bytes);
  table.print();
}

}  // namespace

void register_bench_sparse_attention(CLI::App& app, Context& context) {
  auto f = std::make_shared<Flags>();
  CLI::App* sub = add_subcommand(
      app, context,
      {"bench", "times a pass against plain products of as many terms, interleaved in one process",
       "talea bench --operator sparse_attention --tokens 64 --keys 512 --heads 8 --top-k 64 \\\n"
       "               --dim 128 --value-dim 64 --repeats 3",
       ""});
  f->sizes.add(*sub);
  sub->add_option("--dtype", f->dtypes, "one or more, parted by commas")->capture_default_str();
  sub->add_option("--lanes", f->lanes, "one or more, parted by commas")->capture_default_str();
  sub->add_option("--repeats", f->repeats, "samples a run")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  sub->add_option("--seed", f->seed, "of the data")->capture_default_str();
  sub->add_option("--threads", f->threads, "of lanes and products; 0: all")->capture_default_str();
  add_isa(*sub);
  sub->add_option("--receipt", f->receipt, "write the receipt, .json");
  sub->callback([f, sub, &context] {
    f->sizes.note_unread_sizes(context, *sub);
    blame_flags([&] { run(context, *f); });
  });
}

}  // namespace talea::cli
