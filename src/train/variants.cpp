// What: one materialised cross-entropy with a switchable bug.
// Why: every mutant differs from right arithmetic in exactly the line that once was wrong.
// Never: used for a right result; the right lanes are the operator's.
#include "train/variants.hpp"

#include <array>
#include <cmath>
#include <cstring>

#include "core/fail.hpp"
#include "core/half.hpp"
#include "train/product.hpp"

namespace talea::train {
namespace {

constexpr std::array<MutantInfo, 12> table = {{
    {"clamp", "loss", "-log(p + 1e-10): the loss is capped, moments drift later",
     "realistic_long_horizon", "repeat"},
    {"wrong-denominator", "loss", "ignored rows are counted in the mean's divisor", "drift_smoke",
     "ignored"},
    {"ignore-counted", "loss", "ignored rows enter loss and gradient as class 0", "drift_smoke",
     "ignored"},
    {"subtract-bf16", "loss", "p - 1 of the target is formed by subtraction from a bf16 p",
     "drift_smoke", "repeat"},
    {"unordered-sum", "loss", "dW is summed in groups whose number is the thread count",
     "replay_determinism", "text"},
    {"missing-1-over-k", "window", "micro-step gradients are summed but not divided by K",
     "drift_smoke", "text"},
    {"mean-of-means", "window", "mean of means where the tokens of the window were meant",
     "drift_smoke", "varlen"},
    {"nan-blind-gate", "gate", "worst = max(worst, nan) and nan > tolerance: a NaN passes",
     "drift_smoke", "text"},
    {"coupled-decay", "optimizer", "weight decay enters the gradient, as in L2 regularisation",
     "optimizer_parity", ""},
    {"no-bias-correction", "optimizer", "moments are used without their bias correction",
     "optimizer_parity", ""},
    {"float-hyper", "optimizer", "hyper-parameters in fp32: 1 - beta2 is 4.7e-5 off",
     "optimizer_parity", ""},
    {"halved-gradient", "loss", "the gradient of the loss is half of it, the loss is right",
     "fd_gradients", ""},
}};

template <typename T>
class WrongLoss : public Loss<T> {
 public:
  WrongLoss(std::string bug, const TrainConfig& c)
      : bug_(std::move(bug)), threads_(c.threads > 0 ? c.threads : 2) {}

  HeadResult<T> run(const HeadCall<T>& c) override {
    const Batch& b = *c.batch;
    require(b.soft_k == 0, ErrorKind::usage, "loss mutant {}: soft targets are not supported",
            bug_);
    HeadResult<T> result;
    result.lse.assign(static_cast<size_t>(c.tokens), T(0));
    result.logp.assign(static_cast<size_t>(c.tokens), T(0));
    dz_.assign(static_cast<size_t>(c.tokens * c.vocab), T(0));
    product_nt(dz_.data(), c.x, c.w, {c.tokens, c.vocab, c.hidden}, false, 1);
    const double counted = denominator(c);
    const bool empty = b.valid() == 0 && bug_ != "ignore-counted";
    double sum = 0;
    for (int64_t t = 0; t < c.tokens; ++t) {
      T* row = dz_.data() + t * c.vocab;
      int64_t y = b.targets[static_cast<size_t>(t)];
      if (y == ignore_index && bug_ == "ignore-counted") y = 0;
      if (y == ignore_index || empty) {
        std::fill_n(row, c.vocab, T(0));
        continue;
      }
      sum += row_loss(row, y, c.vocab, c.share.upstream / counted, result, t);
    }
    result.loss = empty ? (c.share.empty_is_zero ? 0.0 : NAN) : sum / counted;
    if (c.dx) backward(c);
    return result;
  }

  std::string lane() const override { return "mutant " + bug_; }

 private:
  double denominator(const HeadCall<T>& c) const {
    if (bug_ == "wrong-denominator" || bug_ == "ignore-counted")
      return c.share.denominator > 0 ? c.share.denominator : double(c.tokens);
    return c.share.denominator > 0 ? c.share.denominator : double(c.batch->valid());
  }

  double row_loss(T* row, int64_t y, int64_t vocab, double share, HeadResult<T>& result,
                  int64_t t) const {
    T max = -INFINITY;
    for (int64_t v = 0; v < vocab; ++v) max = std::max(max, row[v]);
    double others = 0;
    for (int64_t v = 0; v < vocab; ++v)
      if (v != y) others += std::exp(double(row[v] - max));
    const double own = std::exp(double(row[y] - max)), all = others + own;
    const double p = own / all;
    result.lse[t] = static_cast<T>(max + std::log(all));
    const double loss = bug_ == "clamp" ? -std::log(p + 1e-10)
                                        : (p > 0.5 ? std::log1p(others / own)
                                                   : std::log(all) - double(row[y] - max));
    result.logp[t] = static_cast<T>(-loss);
    const double pull = bug_ == "clamp" ? p / (p + 1e-10) : 1.0;
    const double scale = share * (bug_ == "halved-gradient" ? 0.5 : 1.0);
    for (int64_t v = 0; v < vocab; ++v) {
      const double q = v == y ? p : std::exp(double(row[v] - max)) / all;
      const double minus = v == y ? -others / all : q;
      row[v] = static_cast<T>(scale * pull * minus);
      if (bug_ == "subtract-bf16")
        row[v] = static_cast<T>(
            scale * (bf16_to_float(float_to_bf16(static_cast<float>(q))) - (v == y ? 1.0 : 0.0)));
    }
    return loss;
  }

  void backward(const HeadCall<T>& c) {
    product_nn(c.dx, dz_.data(), c.w, {c.tokens, c.hidden, c.vocab}, false, 1);
    const int64_t groups = bug_ == "unordered-sum" ? std::min<int64_t>(threads_, c.tokens) : 1;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = c.tokens * g / groups, end = c.tokens * (g + 1) / groups;
      product_tn(c.dw, dz_.data() + begin * c.vocab, c.x + begin * c.hidden,
                 {c.vocab, c.hidden, end - begin}, true, 1);
    }
  }

  std::string bug_;
  int threads_;
  std::vector<T> dz_;
};

}  // namespace

std::span<const MutantInfo> mutants() { return table; }

const MutantInfo* find_mutant(const std::string& name) {
  for (const MutantInfo& m : table)
    if (name == m.name) return &m;
  return nullptr;
}

bool is_loss_mutant(const std::string& name) {
  const MutantInfo* m = find_mutant(name);
  return m && std::strcmp(m->kind, "loss") == 0;
}

template <typename T>
std::unique_ptr<Loss<T>> make_loss_mutant(const std::string& name, const TrainConfig& config) {
  return std::make_unique<WrongLoss<T>>(name, config);
}

template std::unique_ptr<Loss<float>> make_loss_mutant(const std::string&, const TrainConfig&);
template std::unique_ptr<Loss<double>> make_loss_mutant(const std::string&, const TrainConfig&);

}  // namespace talea::train
