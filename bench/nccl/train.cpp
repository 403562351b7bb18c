// What: see train.hpp.
// Why: see train.hpp.
// Never: times anything but the whole update, for the receipt's sake.
#include "bench/nccl/train.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "core/fail.hpp"
#include "core/receipt.hpp"

namespace talea::bench {
namespace {

constexpr int kSteps = 500;
constexpr double kTrainBound = 1e-5;

// A bigram model, trained by plain SGD: hidden = embedding[word]. In fp32, on one rank or many.
class Bigram {
 public:
  Bigram(const World& w, DeviceSession& d, const std::string& lane, int64_t vocab, Communicator* c)
      : d_(d), vocab_(vocab) {
    const int size = c ? w.size : 1, rank = c ? w.rank : 0;
    begin_ = even_shard_begin(vocab, size, rank);
    rows_ = even_shard_begin(vocab, size, rank + 1) - begin_;
    fill(embedding_, vocab * dim, 11);
    std::vector<float> whole;
    fill(whole, vocab * dim, 12);
    weight_.assign(whole.begin() + begin_ * dim, whole.begin() + (begin_ + rows_) * dim);
    options_.lane = lane;
    options_.vocab = vocab;
    ranks_.vocab = c;
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
    if (ranks_.vocab) ranks_.vocab->wait(d_.stream());
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
  std::vector<float> embedding_, weight_;
  LinearCrossEntropyInputs in_;
  LinearCrossEntropyOutputs out_;
  LinearCrossEntropyOptions options_;
  LinearCrossEntropyRanks ranks_;
  Workspace workspace_;
};

}  // namespace

nlohmann::json train_both(World& w, DeviceSession& d, const std::string& lane, int64_t vocab,
                          bool& passed) {
  const auto gpu = w.join(-1);
  Bigram one(w, d, lane, vocab, nullptr), many(w, d, lane, vocab, gpu.get());
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

}  // namespace talea::bench
