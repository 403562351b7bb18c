// What: see speed.hpp.
// Why: see speed.hpp.
// Never: times a variant alone: all take turns, sample by sample.
#include "bench/nccl/speed.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>

#include "bench/nccl/errors.hpp"
#include "core/fail.hpp"

namespace talea::bench {
namespace {

constexpr int kSamples = 9, kWarmup = 1, kCalls = 3, kTraced = 3;
constexpr const char* limit =
    "the world of one of the same lane on the same GPUs, sample by sample; a sample is three calls "
    "queued one after the other, its time a third of theirs, of the slowest rank; "
    "efficiency = time of one / (R * time of R)";

std::string name_of(const Variant& v) {
  const std::string left =
      v.multiprocessors > 0 ? fmt::format(", {} multiprocessors", v.multiprocessors) : "";
  if (v.kind == "beside") return "world R, dX beside dW" + left;
  if (v.kind == "bf16") return "world R, dX beside dW in bf16" + left;
  if (v.kind == "once") return "world R, dX summed at once" + left;
  if (v.kind == "sequence") return "world R, sequence parallel" + left;
  if (v.kind == "uneven") return "world R, uneven shards" + left;
  require(v.kind == "silent", ErrorKind::usage,
          "variant {}: beside, bf16, once, sequence, uneven or silent", v.kind);
  return "world R, nothing exchanged" + left;
}

// Where shard r of an uneven cut begins: the first is a quarter larger than an even one, the last
// as much smaller.
int64_t uneven_begin(int64_t vocab, int ranks, int rank) {
  const int64_t more = rank > 0 && rank < ranks ? vocab / ranks / 4 : 0;
  return even_shard_begin(vocab, ranks, rank) + more;
}

struct Subject {
  std::string name;
  Variant variant{"", 0};
  int world = 1;
  int64_t begin = 0, end = 0;  // words whose dW is compared
  LinearCrossEntropyInputs in;
  LinearCrossEntropyOutputs out;
  LinearCrossEntropyOptions options;
  LinearCrossEntropyRanks ranks;
  LinearCrossEntropyProblem problem;
  LinearCrossEntropyResult result;
  Workspace workspace;
  std::unique_ptr<Communicator> wrapped;
  nlohmann::json errors;
  std::vector<double> ms;
};

class Speed {
 public:
  Speed(World& w, DeviceSession& d, const Size& size) : w_(w), d_(d), size_(size) {
    begin_ = even_shard_begin(size.vocab, w.size, w.rank);
    end_ = even_shard_begin(size.vocab, w.size, w.rank + 1);
    hidden_ = make(DType::bf16, {size.tokens, size.hidden});
    weight_ = make(DType::bf16, {size.vocab, size.hidden});
    targets_ = make(DType::i64, {size.tokens});
    shard_targets_ = make(DType::i64, {size.tokens});
    loss_ = make(DType::f32, {});
    dx_ = make(DType::bf16, {size.tokens, size.hidden});
    dw_ = make(DType::f32, {size.vocab, size.hidden});
    d_.fill_normal(hidden_, 1, 1);
    d_.fill_normal(weight_, 2, 1 / std::sqrt(static_cast<double>(size.hidden)));
    d_.fill_ids(targets_, 3, size.vocab);
    d_.fill_ids(shard_targets_, 4, end_ - begin_);
  }

  nlohmann::json run(const std::vector<Variant>& variants, std::vector<lce::CallFacts>& calls) {
    add("world 1", nullptr);
    add("one rank's shard as a world of one", nullptr).world = 0;
    for (const Variant& v : variants) {
      auto& gpu = joined_[v.multiprocessors];
      if (!gpu) gpu = w_.join(v.multiprocessors);
      say("joined for " + name_of(v));
      Subject& s = add(name_of(v), gpu.get(), v);
      s.variant = v;
      s.world = w_.size;
    }
    check();
    say("sampling");
    const int64_t extra = take_samples();
    nlohmann::json section = {{"limit", limit}, {"runs", runs(extra, calls)}, {"links", links()}};
    bool passed = true;
    for (const nlohmann::json& each : section["runs"])
      passed = passed && each.value("passed", true);
    section["passed"] = passed;
    return section;
  }

 private:
  // Progress, on every rank: what a world that does not end was doing.
  void say(const std::string& what) const {
    std::printf("rank %d: %s\n", w_.rank, what.c_str());
    std::fflush(stdout);
  }

  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape, DeviceKind::cuda, 0);
    t.data = d_.allocate(t.elements() * size_of(dtype));
    return t;
  }
  static Tensor rows(const Tensor& t, int64_t begin, int64_t end) {
    Tensor part = t;
    part.shape[0] = end - begin;
    part.data = static_cast<char*>(t.data) + begin * t.stride[0] * size_of(t.dtype);
    return part;
  }

  // c: null for a world of one; the second subject is the shard alone.
  Subject& add(const std::string& name, Communicator* c, const Variant& v = {"", 0}) {
    subjects_.push_back(std::make_unique<Subject>());
    Subject& s = *subjects_.back();
    s.name = name;
    const bool alone = !c && subjects_.size() == 2, whole = !c && !alone;
    const auto cut = v.kind == "uneven" ? uneven_begin : even_shard_begin;
    const int64_t begin = whole ? 0 : cut(size_.vocab, w_.size, w_.rank);
    const int64_t end = whole ? size_.vocab : cut(size_.vocab, w_.size, w_.rank + 1);
    s.begin = whole ? begin_ : begin, s.end = whole ? end_ : end;
    s.options.lane = size_.lane;
    s.options.vocab = alone ? end - begin : size_.vocab;
    s.options.workspace_limit_bytes = size_.limit_bytes;
    s.in.hidden = hidden_;
    s.in.weight = rows(weight_, begin, end);
    s.in.targets = alone ? shard_targets_ : targets_;
    s.out.loss = loss_;
    s.out.dx = dx_;
    if (v.kind == "sequence") {
      const int64_t each = size_.tokens / w_.size, first = each * w_.rank;
      s.in.hidden = rows(hidden_, first, first + each);
      s.out.dx = rows(dx_, first, first + each);
      s.ranks.sequence_parallel = true;
    }
    s.out.dw = rows(dw_, begin, end);
    if (v.kind == "once") s.wrapped = std::make_unique<AtOnce>(*c);
    if (v.kind == "silent") s.wrapped = std::make_unique<Silent>(*c);
    s.ranks.vocab = s.wrapped ? s.wrapped.get() : c;
    s.ranks.vocab_begin = alone ? 0 : begin;
    if (v.kind == "bf16") s.ranks.dx_sum = DType::bf16;
    s.problem = describe(s.in, s.out, s.options, s.ranks);
    const int64_t bytes = workspace_bytes(s.problem);
    s.workspace = {d_.allocate(bytes), bytes};
    return s;
  }

  void call(Subject& s) {
    s.result = linear_cross_entropy(s.in, s.out, s.options, s.workspace, s.ranks, d_.stream());
    s.ranks.handshake = false;  // once is enough: it waits for the host
  }
  void settle(const Subject& s) {
    if (s.ranks.vocab)
      s.ranks.vocab->wait(d_.stream());
    else
      d_.synchronise();
  }

  Outcome outcome(const Subject& s) {
    return download(d_, loss_, s.out.dx, rows(dw_, s.begin, s.end));
  }
  // What the world of one has where `s` writes: the same rows of dX, the same words of dW.
  const Outcome& truth_for(const Subject& s) {
    const auto place = std::make_tuple(s.out.dx.data, s.out.dx.shape[0], s.begin, s.end);
    if (place != truth_place_) {
      call(*subjects_[0]);
      d_.synchronise();
      truth_ = outcome(s);
      truth_place_ = place;
    }
    return truth_;
  }

  // Every variant against the world of one, and against itself. Each starts from poisoned outputs.
  void check() {
    for (const auto& each : subjects_) {
      Subject& s = *each;
      if (s.variant.kind == "silent" || s.world == 0) {
        call(s);
        settle(s);
        if (auto* silent = dynamic_cast<Silent*>(s.wrapped.get())) silent->silent = true;
        continue;
      }
      Outcome first;
      for (int time = 0; time < 2; ++time) {
        d_.fill_bytes(dx_.data, 0xff, size_.tokens * size_.hidden * 2);
        d_.fill_bytes(dw_.data, 0xff, size_.vocab * size_.hidden * 4);
        call(s);
        settle(s);
        say("called: " + s.name);
        Outcome now = outcome(s);
        if (time == 1) s.errors["repeats_bitwise"] = same_bits(first, now, w_);
        first = std::move(now);
      }
      if (s.world > 1) s.errors.update(compare(first, truth_for(s), w_));
    }
  }

  // What was taken from the device beyond the workspaces.
  int64_t take_samples() {
    const int64_t before = d_.free_bytes();
    int64_t least = before;
    for (int sample = -kWarmup; sample < kSamples; ++sample)
      for (const auto& s : subjects_) {
        w_.meet();
        const double ms = w_.largest(d_.time_ms([&] {
          for (int i = 0; i < kCalls; ++i) call(*s);
        }));
        if (sample >= 0) s->ms.push_back(ms / kCalls);
        least = std::min(least, d_.free_bytes());
      }
    return std::max<int64_t>(0, before - least);
  }

  // Where rank 0's time of one call goes, by marks on the stream: medians.
  nlohmann::json parts_of(Subject& s) {
    Marked marked(*s.ranks.vocab, d_);
    Communicator* const own = s.ranks.vocab;
    s.ranks.vocab = &marked;
    std::vector<std::vector<double>> ms;
    for (int i = 0; i < kTraced; ++i) {
      w_.meet();
      marked.start();
      call(s);
      marked.end("work after the last exchange");
      settle(s);
      ms.resize(marked.parts.size());
      for (size_t k = 1; k < marked.parts.size(); ++k)
        ms[k].push_back(d_.between_ms(marked.parts[k - 1].mark, marked.parts[k].mark));
    }
    s.ranks.vocab = own;
    nlohmann::json parts = nlohmann::json::array();
    for (size_t k = 1; k < ms.size(); ++k)
      parts.push_back({{"part", marked.parts[k].name}, {"median_ms", time_stats(ms[k]).median_ms}});
    return parts;
  }

  nlohmann::json runs(int64_t extra, std::vector<lce::CallFacts>& calls) {
    nlohmann::json all = nlohmann::json::array();
    const std::string shape = fmt::format("{}x{}x{}", size_.tokens, size_.hidden, size_.vocab);
    const double one = time_stats(subjects_[0]->ms).median_ms;
    for (const auto& each : subjects_) {
      Subject& s = *each;
      const TimeStats t = time_stats(s.ms);
      const int ranks = s.world == 0 ? w_.size : s.world;  // whose share of the work it is
      const double efficiency = one / (ranks * t.median_ms);
      all.push_back({{"name", s.name},
                     {"lane", s.result.lane},
                     {"case", shape},
                     {"ranks", ranks},
                     {"time", to_json(t)},
                     {"efficiency", efficiency},
                     {"extra_bytes", extra + s.workspace.bytes},
                     {"declared_bytes", s.result.workspace_bytes},
                     {"words_of_rank_0", s.in.weight.shape[0]},
                     {"chunk_rows", s.result.chunk_rows},
                     {"flops", s.result.flops}});
      if (s.world > 1) {
        all.back()["multiprocessors_beside"] = s.ranks.vocab->multiprocessors_beside();
        all.back()["dx_sum"] = talea::name_of(s.ranks.dx_sum);
        all.back()["parts_of_rank_0"] = parts_of(s);
      }
      if (!s.errors.is_null()) {
        all.back()["errors"] = s.errors;
        all.back()["passed"] = s.errors["repeats_bitwise"] && s.errors.value("passed", true);
      }
      if (s.world > 0) calls.push_back(facts(s, extra, t));
      print(s, t, efficiency, extra, all.back());
    }
    return all;
  }

  lce::CallFacts facts(const Subject& s, int64_t extra, const TimeStats& t) const {
    lce::CallFacts f;
    f.problem = s.problem;
    f.result = s.result;
    f.collective = s.world > 1 ? s.ranks.vocab->engine() : "none";
    const auto cut = s.variant.kind == "uneven" ? uneven_begin : even_shard_begin;
    for (int r = 0; r < s.world; ++r)
      f.shards.push_back({r, cut(size_.vocab, s.world, r), cut(size_.vocab, s.world, r + 1)});
    f.measured_peak_extra_bytes = extra + s.workspace.bytes;
    f.measured_by = "free device memory after every call, and the workspace";
    f.time = t;
    return f;
  }

  void print(const Subject& s, const TimeStats& t, double efficiency, int64_t extra,
             const nlohmann::json& run) const {
    if (w_.rank > 0) return;
    std::printf(
        "%s V=%lld R=%d %-52s median %8.3f p20 %8.3f p80 %8.3f eff %.4f chunk %lld "
        "ws %.1f MiB extra %lld %s\n",
        size_.lane.c_str(), static_cast<long long>(size_.vocab), w_.size, s.name.c_str(),
        t.median_ms, t.p20_ms, t.p80_ms, efficiency, static_cast<long long>(s.result.chunk_rows),
        static_cast<double>(s.workspace.bytes) / 1048576, static_cast<long long>(extra),
        s.errors.dump().c_str());
    if (run.contains("parts_of_rank_0"))
      for (const nlohmann::json& part : run["parts_of_rank_0"])
        std::printf("    %8.3f %s\n", part["median_ms"].get<double>(),
                    part["part"].get<std::string>().c_str());
    std::fflush(stdout);
  }

  // One collective alone, ten queued one after the other, as the ranks' model needs it.
  nlohmann::json link(const char* name, int64_t bytes, int multiprocessors,
                      const std::function<void()>& work) {
    constexpr int each = 10;
    std::vector<double> ms;
    for (int s = 0; s < kSamples; ++s) {
      w_.meet();
      ms.push_back(w_.largest(d_.time_ms([&] {
        for (int i = 0; i < each; ++i) work();
      })) / each);
    }
    const TimeStats t = time_stats(ms);
    if (w_.rank == 0)
      std::printf("link %s %lld bytes mp %d: %.4f ms\n", name, static_cast<long long>(bytes),
                  multiprocessors, t.median_ms);
    return {{"collective", name},
            {"bytes", bytes},
            {"multiprocessors", multiprocessors},
            {"time", to_json(t)}};
  }

  nlohmann::json links() {
    const int64_t dx = size_.tokens * size_.hidden, states = size_.tokens * 64;
    void* buffer = d_.allocate(dx * 4);
    void* gathered = d_.allocate(states * w_.size);
    d_.fill_bytes(buffer, 0, dx * 4);
    nlohmann::json all = nlohmann::json::array();
    for (const auto& [count, gpu] : joined_) {
      Communicator& c = *gpu;
      all.push_back(link("all_reduce_sum fp32", dx * 4, count,
                         [&] { c.all_reduce_sum(buffer, dx, DType::f32, d_.stream()); }));
      all.push_back(link("all_reduce_sum bf16", dx * 2, count,
                         [&] { c.all_reduce_sum(buffer, dx, DType::bf16, d_.stream()); }));
      for (const int64_t bytes : {states, int64_t{8}})
        all.push_back(link("all_gather", bytes, count,
                           [&] { c.all_gather(buffer, gathered, bytes, d_.stream()); }));
    }
    return all;
  }

  World& w_;
  DeviceSession& d_;
  const Size size_;
  int64_t begin_ = 0, end_ = 0;  // of this rank's even shard
  Outcome truth_;
  std::tuple<void*, int64_t, int64_t, int64_t> truth_place_{};
  Tensor hidden_, weight_, targets_, shard_targets_, loss_, dx_, dw_;
  std::map<int, std::unique_ptr<Communicator>> joined_;  // by their multiprocessors
  std::vector<std::unique_ptr<Subject>> subjects_;
};

}  // namespace

std::vector<Variant> parse_variants(const std::string& text) {
  std::vector<Variant> all;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string one = text.substr(at, comma - at);
    const size_t colon = one.find(':');
    require(colon != std::string::npos, ErrorKind::usage, "variant {}: KIND:MULTIPROCESSORS", one);
    all.push_back({one.substr(0, colon), std::atoi(one.c_str() + colon + 1)});
    name_of(all.back());
    at = comma + 1;
  }
  return all;
}

nlohmann::json measure_speed(World& world, DeviceSession& device, const Size& size,
                             const std::vector<Variant>& variants,
                             std::vector<lce::CallFacts>& calls) {
  return Speed(world, device, size).run(variants, calls);
}

}  // namespace talea::bench
