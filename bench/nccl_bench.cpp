// What: a device lane over NCCL ranks, one process a GPU, beside the world of one on the same GPUs.
// Why: what ranks cost, hide and need is known only where the links are; receipts come from here.
// Never: compares with a number of another run: worlds of one and of R alternate, sample by sample.
//
//   talea_nccl_bench RANK SIZE FILE LIBRARY TOKENS HIDDEN VOCAB LANE LIMIT_MIB RECEIPT
// RECEIPT "-": none. TOKENS 0: training, HIDDEN updates over VOCAB words.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/device_session.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "core/receipt.hpp"
#include "io/receipt_file.hpp"
#include "talea/ranks.hpp"

namespace {

using namespace talea;
constexpr int kSamples = 15, kWarmup = 3, kSteps = 500;
constexpr double kBf16Bound = 0x1p-8, kFp32Bound = 1e-5, kLossBound = 1e-6, kTrainBound = 1e-5;

// Hands everything on, but sums at once on the caller's stream: what overlap is measured against.
class InOrder final : public Communicator {
 public:
  explicit InOrder(Communicator& c) : c_(c) {}
  const char* engine() const override { return c_.engine(); }
  int rank() const override { return c_.rank(); }
  int size() const override { return c_.size(); }
  DeviceKind device() const override { return c_.device(); }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream s) override {
    c_.all_gather(send, recv, bytes, s);
  }
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream s) override {
    c_.all_reduce_sum(buffer, count, dtype, s);
  }
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream s) override {
    c_.reduce_scatter_sum(send, recv, count, dtype, s);
  }
  bool host_gather(const void* send, void* recv, int64_t bytes) override {
    return c_.host_gather(send, recv, bytes);
  }

 private:
  Communicator& c_;
};

struct World {
  int rank, size;
  std::unique_ptr<Communicator> host, gpu;

  double largest(double own) const {
    std::vector<double> all(static_cast<size_t>(size));
    host->all_gather(&own, all.data(), sizeof own, nullptr);
    return *std::max_element(all.begin(), all.end());
  }
  void meet() const { largest(0); }
};

World join(int rank, int size, const std::string& file, const std::string& library) {
  World w{rank, size, make_shared_communicator({rank, size, file, 120}), nullptr};
  std::string own = rank == 0 ? nccl_unique_id(library) : std::string(128, '\0');
  std::string all(own.size() * size, '\0');
  w.host->all_gather(own.data(), all.data(), static_cast<int64_t>(own.size()), nullptr);
  NcclOptions o;
  o.rank = rank;
  o.size = size;
  o.timeout_s = 120;
  o.unique_id = all.substr(0, own.size());
  o.host = w.host.get();
  o.library = library;
  w.gpu = make_nccl_communicator(o);
  return w;
}

struct Data {
  Tensor hidden, weight, targets, loss, dx, dw;
  Workspace workspace;
};

struct Subject {
  const char* name;
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  LinearCrossEntropyRanks ranks;
  LinearCrossEntropyProblem problem;
  LinearCrossEntropyResult result;
  Workspace workspace;
  std::vector<double> ms;
};

class Bench {
 public:
  Bench(World& w, DeviceSession& d, char** argv)
      : w_(w),
        d_(d),
        tokens_(std::atoll(argv[5])),
        hidden_(std::atoll(argv[6])),
        vocab_(std::atoll(argv[7])),
        lane_(argv[8]),
        limit_bytes_(std::atoll(argv[9]) << 20) {}

  nlohmann::json run(std::vector<CallFacts>& calls) {
    make_data();
    begin_ = even_shard_begin(vocab_, w_.size, w_.rank);
    end_ = even_shard_begin(vocab_, w_.size, w_.rank + 1);
    InOrder plain(*w_.gpu);
    Subject one = subject("world 1", nullptr), many = subject("world R", w_.gpu.get());
    Subject in_order = subject("world R, dX summed at once", &plain);
    // A call of the world of one must not see what the other worlds left.
    std::vector<Subject*> all = {&one, &many, &in_order};
    d_.synchronise();
    call(one);
    d_.synchronise();
    const Kept truth = keep(0, vocab_);
    d_.fill_bytes(data_.dx.data, 0xff, tokens_ * hidden_ * 2);
    d_.fill_bytes(data_.dw.data, 0xff, vocab_ * hidden_ * 4);
    call(many);
    w_.gpu->wait(d_.stream());
    const nlohmann::json errors = compare(truth);
    const int64_t free_before = d_.free_bytes();
    int64_t least = free_before;
    for (int s = -kWarmup; s < kSamples; ++s)
      for (Subject* each : all) {
        w_.meet();
        const double ms = w_.largest(d_.time_ms([&] { call(*each); }));
        if (s >= 0) each->ms.push_back(ms);
        least = std::min(least, d_.free_bytes());
      }
    return report(all, errors, free_before - least, calls);
  }

 private:
  struct Kept {
    double loss;
    std::vector<uint16_t> dx;
    std::vector<float> dw;  // of this rank's rows
  };

  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda, 0);
    t.data = d_.allocate(t.elements() * size_of(dtype));
    return t;
  }

  void make_data() {
    data_.hidden = make(DType::bf16, {tokens_, hidden_});
    data_.weight = make(DType::bf16, {vocab_, hidden_});
    data_.targets = make(DType::i64, {tokens_});
    data_.loss = make(DType::f32, {});
    data_.dx = make(DType::bf16, {tokens_, hidden_});
    data_.dw = make(DType::f32, {vocab_, hidden_});
    d_.fill_normal(data_.hidden, 1, 1);
    d_.fill_normal(data_.weight, 2, 1 / std::sqrt(static_cast<double>(hidden_)));
    d_.fill_ids(data_.targets, 3, vocab_);
  }

  Subject subject(const char* name, Communicator* c) {
    Subject s{name, {}, {}, {}, {}, {}, {}, {}, {}};
    s.options.lane = lane_;
    s.options.vocab = vocab_;
    s.options.workspace_limit_bytes = limit_bytes_;
    const int64_t begin = c ? begin_ : 0, end = c ? end_ : vocab_;
    s.in.hidden = data_.hidden;
    s.in.weight = rows(data_.weight, begin, end);
    s.in.targets = data_.targets;
    s.out.loss = data_.loss;
    s.out.dx = data_.dx;
    s.out.dw = rows(data_.dw, begin, end);
    s.ranks.vocab = c;
    s.ranks.vocab_begin = begin;
    s.problem = describe(s.in, s.out, s.options, s.ranks);
    const int64_t bytes = workspace_bytes(s.problem);
    s.workspace = {d_.allocate(bytes), bytes};
    return s;
  }
  static Tensor rows(const Tensor& t, int64_t begin, int64_t end) {
    Tensor part = t;
    part.shape[0] = end - begin;
    part.data = static_cast<char*>(t.data) + begin * t.stride[0] * size_of(t.dtype);
    return part;
  }

  void call(Subject& s) {
    s.result = linear_cross_entropy(s.in, s.out, s.options, s.workspace, s.ranks, d_.stream());
    s.ranks.handshake = false;  // once is enough: it waits for the host
  }

  Kept keep(int64_t begin, int64_t end) {
    Kept k{};
    float loss = 0;
    d_.download(&loss, data_.loss.data, 4);
    k.loss = loss;
    k.dx.resize(static_cast<size_t>(tokens_ * hidden_));
    d_.download(k.dx.data(), data_.dx.data, tokens_ * hidden_ * 2);
    k.dw.resize(static_cast<size_t>((end - begin) * hidden_));
    const Tensor part = rows(data_.dw, begin, end);
    d_.download(k.dw.data(), part.data, static_cast<int64_t>(k.dw.size()) * 4);
    return k;
  }

  nlohmann::json compare(const Kept& truth) {
    const Kept ours = keep(begin_, end_);
    double square = 0, error = 0;
    for (size_t i = 0; i < truth.dx.size(); ++i) {
      const double a = load_element(ours.dx.data(), DType::bf16, static_cast<int64_t>(i)),
                   b = load_element(truth.dx.data(), DType::bf16, static_cast<int64_t>(i));
      error += (a - b) * (a - b);
      square += b * b;
    }
    const double dx = w_.largest(std::sqrt(error / square));
    square = error = 0;
    const float* whole = truth.dw.data() + begin_ * hidden_;
    for (size_t i = 0; i < ours.dw.size(); ++i) {
      error += (double{ours.dw[i]} - whole[i]) * (double{ours.dw[i]} - whole[i]);
      square += double{whole[i]} * whole[i];
    }
    const double dw = w_.largest(std::sqrt(error / square));
    const double loss = w_.largest(std::abs(ours.loss - truth.loss) / std::abs(truth.loss));
    const bool right = loss <= kLossBound && dx <= kBf16Bound && dw <= kBf16Bound;
    return {
        {"loss_relative", loss},    {"dx_relative_l2", dx},
        {"dw_relative_l2", dw},     {"against", "the world of one of the same lane, worst rank"},
        {"bound_loss", kLossBound}, {"bound_gradients", kBf16Bound},
        {"passed", right}};
  }

  // One collective alone, as the ranks' model needs it.
  nlohmann::json link(const char* name, int64_t bytes, const std::function<void()>& work) {
    std::vector<double> ms;
    for (int s = 0; s < kSamples; ++s) {
      w_.meet();
      ms.push_back(w_.largest(d_.time_ms(work)));
    }
    return {{"collective", name}, {"bytes", bytes}, {"time", to_json(time_stats(ms))}};
  }

  nlohmann::json links() {
    const int64_t dx = tokens_ * hidden_, states = tokens_ * 64;
    void* buffer = d_.allocate(dx * 4);
    void* gathered = d_.allocate(states * w_.size);
    d_.fill_bytes(buffer, 0, dx * 4);
    return {link("all_reduce_sum fp32", dx * 4,
                 [&] { w_.gpu->all_reduce_sum(buffer, dx, DType::f32, d_.stream()); }),
            link("all_gather", states,
                 [&] { w_.gpu->all_gather(buffer, gathered, states, d_.stream()); }),
            link("all_gather", 8, [&] { w_.gpu->all_gather(buffer, gathered, 8, d_.stream()); })};
  }

  nlohmann::json report(const std::vector<Subject*>& all, const nlohmann::json& errors,
                        int64_t extra, std::vector<CallFacts>& calls) {
    nlohmann::json runs = nlohmann::json::array();
    const TimeStats one = time_stats(all[0]->ms);
    const std::string shape = fmt::format("{}x{}x{}", tokens_, hidden_, vocab_);
    for (const Subject* s : all) {
      const TimeStats t = time_stats(s->ms);
      const int ranks = s == all[0] ? 1 : w_.size;
      const double efficiency = one.median_ms / (ranks * t.median_ms);
      runs.push_back({{"name", s->name},
                      {"lane", s->result.lane},
                      {"case", shape},
                      {"ranks", ranks},
                      {"time", to_json(t)},
                      {"efficiency", efficiency},
                      {"extra_bytes", std::max<int64_t>(extra, 0) + s->workspace.bytes},
                      {"declared_bytes", s->result.workspace_bytes},
                      {"chunk_rows", s->result.chunk_rows},
                      {"flops", s->result.flops}});
      CallFacts f;
      f.problem = s->problem;
      f.result = s->result;
      f.collective = ranks > 1 ? s->ranks.vocab->engine() : "none";
      for (int r = 0; r < ranks; ++r)
        f.shards.push_back(
            {r, even_shard_begin(vocab_, ranks, r), even_shard_begin(vocab_, ranks, r + 1)});
      f.measured_peak_extra_bytes = std::max<int64_t>(extra, 0) + s->workspace.bytes;
      f.measured_by = "free device memory after every call, and the workspace";
      f.time = t;
      calls.push_back(f);
      if (w_.rank == 0)
        std::printf(
            "%s %s R=%d %-28s median %8.3f ms p20 %8.3f p80 %8.3f efficiency %.4f "
            "chunk %lld ws %.1f MiB extra %lld\n",
            shape.c_str(), lane_.c_str(), w_.size, s->name, t.median_ms, t.p20_ms, t.p80_ms,
            efficiency, static_cast<long long>(s->result.chunk_rows),
            static_cast<double>(s->workspace.bytes) / 1048576, static_cast<long long>(extra));
    }
    const nlohmann::json measured = links();
    if (w_.rank == 0)
      std::printf("errors %s\nlinks %s\n", errors.dump().c_str(), measured.dump().c_str());
    return {{"limit",
             "the world of one of the same lane on the same GPUs, sample by sample; "
             "efficiency = time of one / (R * time of R), the slowest rank's time"},
            {"runs", runs},
            {"errors", errors},
            {"links", measured}};
  }

  World& w_;
  DeviceSession& d_;
  int64_t tokens_, hidden_, vocab_, begin_ = 0, end_ = 0;
  std::string lane_;
  int64_t limit_bytes_;
  Data data_;
};

// A bigram model, trained by plain SGD: hidden = embedding[word]. In fp32, on one rank or many.
class Bigram {
 public:
  Bigram(World& w, DeviceSession& d, const std::string& lane, int64_t vocab, bool many)
      : d_(d), vocab_(vocab), many_(many) {
    const int size = many ? w.size : 1, rank = many ? w.rank : 0;
    begin_ = even_shard_begin(vocab, size, rank);
    rows_ = even_shard_begin(vocab, size, rank + 1) - begin_;
    fill(embedding_, vocab * dim, 11);
    std::vector<float> whole;
    fill(whole, vocab * dim, 12);
    weight_.assign(whole.begin() + begin_ * dim, whole.begin() + (begin_ + rows_) * dim);
    options_.lane = lane;
    options_.vocab = vocab;
    ranks_.vocab = many ? w.gpu.get() : nullptr;
    ranks_.vocab_begin = begin_;
    in_.hidden = make(DType::f32, {tokens, dim});
    in_.weight = make(DType::f32, {rows_, dim});
    in_.targets = make(DType::i64, {tokens});
    out_.loss = make(DType::f32, {});
    out_.dx = make(DType::f32, {tokens, dim});
    out_.dw = make(DType::f32, {rows_, dim});
    const int64_t bytes = workspace_bytes(describe(in_, out_, options_, ranks_));
    workspace_ = {d_.allocate(bytes), bytes};
  }

  double step(int64_t number) {
    std::vector<int64_t> words(tokens), targets(tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      words[t] = static_cast<int64_t>(mix(number * tokens + t) % static_cast<uint64_t>(vocab_));
      // Each word is followed by one of four.
      targets[t] = (words[t] * 7 + static_cast<int64_t>(mix(~(number * tokens + t)) % 4)) % vocab_;
    }
    std::vector<float> x(static_cast<size_t>(tokens * dim)), dx(x.size()), dw(weight_.size());
    for (int64_t t = 0; t < tokens; ++t)
      std::memcpy(&x[t * dim], &embedding_[words[t] * dim], dim * 4);
    d_.upload(in_.hidden.data, x.data(), static_cast<int64_t>(x.size()) * 4);
    d_.upload(in_.weight.data, weight_.data(), static_cast<int64_t>(weight_.size()) * 4);
    d_.upload(in_.targets.data, targets.data(), tokens * 8);
    linear_cross_entropy(in_, out_, options_, workspace_, ranks_, d_.stream());
    if (many_) ranks_.vocab->wait(d_.stream());
    float loss = 0;
    d_.download(&loss, out_.loss.data, 4);
    d_.download(dx.data(), out_.dx.data, static_cast<int64_t>(dx.size()) * 4);
    d_.download(dw.data(), out_.dw.data, static_cast<int64_t>(dw.size()) * 4);
    for (size_t i = 0; i < dw.size(); ++i) weight_[i] -= rate * dw[i];
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < dim; ++i) embedding_[words[t] * dim + i] -= rate * dx[t * dim + i];
    return loss;
  }

 private:
  static constexpr int64_t tokens = 256, dim = 64;
  static constexpr float rate = 20;

  static uint64_t mix(int64_t n) {
    uint64_t z = (static_cast<uint64_t>(n) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  static void fill(std::vector<float>& to, int64_t count, int64_t seed) {
    to.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
      to[i] = static_cast<float>(static_cast<double>(mix((seed << 40) + i) >> 11) * 0x1p-53 - 0.5) *
              0.25f;
  }
  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda, 0);
    t.data = d_.allocate(std::max<int64_t>(1, t.elements()) * size_of(dtype));
    return t;
  }

  DeviceSession& d_;
  int64_t vocab_, begin_ = 0, rows_ = 0;
  bool many_;
  std::vector<float> embedding_, weight_;
  LinearCrossEntropyInputs in_;
  LinearCrossEntropyOutputs out_;
  LinearCrossEntropyOptions options_;
  LinearCrossEntropyRanks ranks_;
  Workspace workspace_;
};

nlohmann::json train(World& w, DeviceSession& d, const std::string& lane, int64_t vocab,
                     bool& passed) {
  Bigram one(w, d, lane, vocab, false), many(w, d, lane, vocab, true);
  nlohmann::json losses_one = nlohmann::json::array(), losses_many = nlohmann::json::array();
  double worst = 0;
  std::vector<double> ms;
  for (int64_t s = 0; s < kSteps; ++s) {
    const double a = one.step(s);
    const auto begin = std::chrono::steady_clock::now();
    const double b = many.step(s);
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
                     .count());
    const double off = std::abs(a - b) / std::abs(a);
    if (!(off <= worst)) worst = off;
    if (s % 25 == 0 || s + 1 == kSteps) {
      losses_one.push_back(a);
      losses_many.push_back(b);
    }
  }
  worst = w.largest(worst);
  passed = worst <= kTrainBound;
  if (w.rank == 0)
    std::printf(
        "train R=%d %s: %d updates, loss %s -> %s, worst relative difference %.3g of %.3g: %s\n",
        w.size, lane.c_str(), kSteps, losses_one.front().dump().c_str(),
        losses_one.back().dump().c_str(), worst, kTrainBound, passed ? "passed" : "FAILED");
  return {{"limit", "the loss of every update at world 1 and at world R, relative"},
          {"runs",
           {{{"name", fmt::format("{} updates of a bigram model, lane {}", kSteps, lane)},
             {"case", fmt::format("world {} against world 1", w.size)},
             {"time", to_json(time_stats(ms))},
             {"ranks", w.size},
             {"worst_relative_difference", worst},
             {"bound", kTrainBound},
             {"losses_world_1", losses_one},
             {"losses_world_R", losses_many},
             {"passed", passed}}}}};
}

int run(int argc, char** argv) {
  if (argc < 11) return 2;
  Provenance provenance = gather_provenance({argv, argv + argc}, {});
  World w = join(std::atoi(argv[1]), std::atoi(argv[2]), argv[3], argv[4]);
  std::string why;
  const auto d = DeviceSession::open(0, why);
  require(d != nullptr, ErrorKind::unavailable, "{}", why);
  const DeviceClocks clocks = d->clocks();
  std::vector<CallFacts> calls;
  bool passed = true;
  nlohmann::json section;
  if (std::atoll(argv[5]) > 0) {
    section = Bench(w, *d, argv).run(calls);
    passed = section["errors"]["passed"];
  } else {
    section = train(w, *d, argv[8], std::atoll(argv[7]), passed);
  }
  const std::string file = argv[10];
  if (w.rank == 0 && file != "-") {
    if (provenance.device) provenance.device->driver = clocks.driver;
    Receipt receipt(ReceiptKind::bench, provenance);
    for (const CallFacts& f : calls) receipt.call(f);
    receipt.title(fmt::format("Lane {} over {} NCCL ranks", argv[8], w.size));
    receipt.section("bench", section).verdict(passed ? Verdict::passed : Verdict::failed);
    io::write_receipt(file, receipt);
  }
  w.meet();
  return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const talea::Error& e) {
    std::printf("%s\n", e.what());
    return static_cast<int>(e.kind());
  }
}
