// What: the contract's formulas in long double, written down naively.
// Why: an oracle that shares code with the library would share its mistakes.
// Never: includes anything of src/, merges partial states or works in chunks.
#include "yardsticks/linear_cross_entropy/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace talea::testing {
namespace {

constexpr Real nan = __builtin_nanl("");
constexpr Real smallest = 0x1p-126L;  // normal number of fp32

Real square(Real x) { return x * x; }
Real value(const Array& a, int64_t i, Real otherwise) { return a.present() ? a.get(i) : otherwise; }

Real upstream(const Case& c, int64_t t) {
  if (!c.in.upstream.present()) return 1;
  return c.in.upstream.shape().empty() ? c.in.upstream.get() : c.in.upstream.get(t);
}

class Oracle {
 public:
  explicit Oracle(const Case& c)
      : c_(c), o_(c.options), n_(c.tokens()), d_(c.hidden()), v_(c.vocab()) {}

  Answer solve() {
    a_.rows = classify(c_);
    mean_ = mean_of(c_, a_.rows);
    a_.denominator = mean_.denominator;
    allocate();
    for (int64_t t = 0; t < n_; ++t) row(t);
    scalars();
    products();
    return std::move(a_);
  }

 private:
  void allocate() {
    const auto n = static_cast<size_t>(n_), nv = static_cast<size_t>(n_ * v_);
    a_.logits.assign(nv, nan);
    a_.dz.assign(nv, 0);
    slope_.assign(nv, 1);
    dz_size_.assign(nv, 0);
    subtracted_.assign(n, 0);
    a_.row_largest.assign(n, 0);
    if (walks_)
      term_walk_.assign(nv, 0), logit_walk_.assign(size_t(v_), 0), a_.lse_walk.assign(n, 0);
    token_loss_.assign(n, 0);
    a_.lse.assign(n, 0);
    a_.target_logprob.assign(n, 0);
    a_.entropy.assign(n, 0);
    a_.argmax.assign(n, -1);
    for (int64_t v = 0; v < v_; ++v) class_sum_ += value(c_.in.class_weight, v, 1);
    x_ = read(c_.in.hidden, n_);
    w_ = read(c_.in.weight, v_);
  }

  size_t at(int64_t row, int64_t i) const { return static_cast<size_t>(row * d_ + i); }

  std::vector<Real> read(const Array& a, int64_t rows) const {
    std::vector<Real> values(static_cast<size_t>(rows * d_));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < d_; ++i) values[at(r, i)] = a.get(r, i);
    return values;
  }

  // Four words at a time: a sum waits for itself, not for the three beside it.
  void dots(int64_t t, Real* z) const {
    const Real* x = x_.data() + at(t, 0);
    for (int64_t v = 0; v < v_; v += 4) {
      Real sum[4] = {0, 0, 0, 0};
      const Real* w[4];
      for (int64_t k = 0; k < 4; ++k) w[k] = w_.data() + at(std::min(v + k, v_ - 1), 0);
      for (int64_t i = 0; i < d_; ++i)
        for (int k = 0; k < 4; ++k) sum[k] += x[i] * w[k][i];
      for (int64_t k = 0; k < std::min<int64_t>(4, v_ - v); ++k) z[v + k] = sum[k];
    }
  }

  void logits(int64_t t, Real* z) {
    const Real s = Real(o_.logit_scale) * value(c_.in.token_scale, t, 1);
    dots(t, z);
    for (int64_t v = 0; v < v_; ++v) {
      const Real dot = z[v];
      const Real a = s * dot + value(c_.in.bias, v, 0);
      z[v] = o_.softcap > 0 ? o_.softcap * std::tanh(a / o_.softcap) : a;
      const Real cosh = o_.softcap > 0 ? std::cosh(a / o_.softcap) : 1;
      slope_[static_cast<size_t>(t * v_ + v)] = 1 / cosh / cosh;  // 1 - tanh^2 near saturation too
      if (!std::isfinite(z[v])) continue;
      a_.largest_logit = std::max(a_.largest_logit, std::fabs(z[v]));
      // Before the bias it may have been larger; the softcap flattens what that leaves.
      Real& largest = a_.row_largest[static_cast<size_t>(t)];
      largest = std::max({largest, std::fabs(z[v]), std::fabs(s * dot) / cosh / cosh});
      if (walks_)
        logit_walk_[static_cast<size_t>(v)] =
            logit_walk(c_, t, v, x_.data() + at(t, 0), w_.data() + at(v, 0));
    }
  }

  // The deviation of p_v, as a share of it: of its logit beside lse, and of their difference. The
  // target's is that of 1 - p_y if this is more, since the gradient has a term of that size.
  void term_walks(int64_t t, int64_t y, const std::vector<Real>& p, const std::vector<Real>& logp,
                  Real one_minus_py) {
    const std::vector<Real>& own = logit_walk_;
    Real* walk = term_walk_.data() + t * v_;
    Real common = 0, others = 0;
    for (int64_t v = 0; v < v_; ++v) {
      const Real share = p[size_t(v)], apart = share > 0 ? square(logp[size_t(v)]) / 3 : Real(0);
      common += square(share * own[size_t(v)]);
      if (v != y) others += square(share) * (square(own[size_t(v)]) + apart);
      walk[v] = apart;
    }
    for (int64_t v = 0; v < v_; ++v)
      walk[v] += std::max((1 - 2 * p[size_t(v)]) * square(own[size_t(v)]) + common, Real(0));
    if (y >= 0 && one_minus_py > 0)
      walk[y] = std::max(
          walk[y], square(p[size_t(y)]) * (square(own[size_t(y)]) + others / square(one_minus_py)));
    for (int64_t v = 0; v < v_; ++v) walk[v] = std::sqrt(walk[v]);
    a_.lse_walk[size_t(t)] = 5 * std::sqrt(common);
  }

  void row(int64_t t) {
    const auto i = static_cast<size_t>(t);
    if (a_.rows[i] == Row::ignored) return;
    if (a_.rows[i] == Row::poisoned) {
      token_loss_[i] = a_.lse[i] = a_.target_logprob[i] = a_.entropy[i] = nan;
      return;
    }
    Real* z = a_.logits.data() + t * v_;
    logits(t, z);
    Real max = -INFINITY;
    bool broken = false;
    for (int64_t v = 0; v < v_; ++v) {
      broken = broken || std::isnan(z[v]);
      max = std::max(max, z[v]);
    }
    if (broken || std::isinf(max)) {  // NaN or +Inf somewhere, or all -Inf: no distribution
      token_loss_[i] = a_.lse[i] = a_.target_logprob[i] = a_.entropy[i] = nan;
      std::fill_n(a_.dz.begin() + t * v_, v_, nan);
      return;
    }
    const int64_t y = c_.in.targets.present() ? c_.in.targets.integer(t) : -1;
    const int64_t best = std::find(z, z + v_, max) - z;
    Real sum = 0, others = 0, below = 0;
    for (int64_t v = 0; v < v_; ++v) {
      const Real e = std::exp(z[v] - max);
      sum += e;
      if (v != y) others += e;
      if (v != best) below += e;
    }
    std::vector<Real> logp(static_cast<size_t>(v_)), p(logp.size());
    Real entropy = 0;
    for (int64_t v = 0; v < v_; ++v) {
      const auto k = static_cast<size_t>(v);
      // The best keeps its digits, beside which the others may vanish: entropy consists of them.
      logp[k] = v == best ? -std::log1p(below) : z[v] - max - std::log(sum);
      p[k] = std::exp(z[v] - max) / sum;
      if (p[k] > 0) entropy -= p[k] * logp[k];
    }
    if (walks_) term_walks(t, y, p, logp, others / sum);
    a_.lse[i] = max + std::log(sum);
    a_.entropy[i] = entropy;
    a_.argmax[i] = best;
    if (y >= 0) a_.target_logprob[i] = logp[static_cast<size_t>(y)];
    loss_and_gradient(t, y, logp, p, others / sum);
  }

  void loss_and_gradient(int64_t t, int64_t y, const std::vector<Real>& logp,
                         const std::vector<Real>& p, Real one_minus_py) {
    const auto i = static_cast<size_t>(t);
    const Real eps = o_.label_smoothing, zeta = o_.z_loss, lse = a_.lse[i];
    const bool soft = c_.in.soft_target_probs.present(), hard = y >= 0;
    const bool sparse = c_.in.soft_target_ids.present();
    const std::vector<Real> q = soft ? distribution(c_, t) : std::vector<Real>();
    Real ce = 0, mass = 0;
    if (hard) {
      const Real cy = value(c_.in.class_weight, y, 1);
      ce = (1 - eps) * cy * -logp[static_cast<size_t>(y)];
      mass = (1 - eps) * cy;
    }
    for (int64_t v = 0; v < v_; ++v) {
      const auto k = static_cast<size_t>(v);
      const Real cv = value(c_.in.class_weight, v, 1);
      if (eps > 0 && (hard || soft)) ce += eps / Real(v_) * cv * -logp[k];
      if (soft && (!sparse || q[k] != 0)) {
        ce += (1 - eps) * cv * q[k] * -logp[k];
        mass += (1 - eps) * cv * q[k];
      }
    }
    const Real w = value(c_.in.token_weight, t, 1);
    token_loss_[i] = w * (ce + zeta * lse * lse);
    const Real g = hard || soft ? upstream(c_, t) * w / mean_.denominator : 0;
    if (hard) subtracted_[i] = std::fabs(g * mass);
    const Real g_lse = value(c_.in.upstream_lse, t, 0);
    const Real g_entropy = value(c_.in.upstream_entropy, t, 0);
    const Real rest = eps > 0 ? eps / Real(v_) * class_sum_ + 2 * zeta * lse : 2 * zeta * lse;
    for (int64_t v = 0; v < v_; ++v) {
      const auto k = static_cast<size_t>(v);
      const Real cv = value(c_.in.class_weight, v, 1);
      const Real terms[] = {v == y ? -g * mass * one_minus_py : g * mass * p[k],
                            g * rest * p[k],
                            soft ? -g * (1 - eps) * cv * q[k] : Real(0),
                            eps > 0 ? -g * eps * cv / Real(v_) : Real(0),
                            g_lse * p[k],
                            p[k] > 0 ? -g_entropy * p[k] * logp[k] : Real(0),
                            p[k] > 0 ? -g_entropy * p[k] * a_.entropy[i] : Real(0)};
      for (const Real term : terms) {
        a_.dz[static_cast<size_t>(t * v_ + v)] += term;
        dz_size_[static_cast<size_t>(t * v_ + v)] += std::fabs(term);
      }
    }
  }

  void scalars() {
    if (o_.reduction == Reduction::none) {
      a_.loss = token_loss_;
    } else {
      const Real sum = std::accumulate(token_loss_.begin(), token_loss_.end(), Real(0));
      const bool counted = o_.denominator != Denominator::given;
      if (o_.reduction == Reduction::sum)
        a_.loss = {sum};
      else if (mean_.empty && counted)
        a_.loss = {o_.on_empty == OnEmpty::nan ? nan : Real(0)};
      else
        a_.loss = {sum / mean_.denominator};
    }
    Real hits = 0, valid = 0;
    for (int64_t t = 0; c_.in.targets.present() && t < n_; ++t) {
      if (a_.rows[static_cast<size_t>(t)] != Row::valid) continue;
      valid += 1;
      if (a_.argmax[static_cast<size_t>(t)] == c_.in.targets.integer(t)) hits += 1;
    }
    a_.accuracy = hits / valid;
  }

  // Sums of sizes, which need no more digits than a double has.
  struct Sizes {
    Sizes(const std::vector<double>& x, const std::vector<double>& w, int64_t d)
        : x_(x), w_(w), d_(d), dx_(x.size(), 0), dw_(w.size(), 0) {}
    void add(int64_t t, int64_t v, Real of_dx, Real of_dw) {
      const auto a = static_cast<double>(of_dx), b = static_cast<double>(of_dw);
      const double *x = x_.data() + t * d_, *w = w_.data() + v * d_;
      double *dx = dx_.data() + t * d_, *dw = dw_.data() + v * d_;
      for (int64_t i = 0; i < d_; ++i) dx[i] += a * w[i];
      for (int64_t i = 0; i < d_; ++i) dw[i] += b * x[i];
    }
    void to(std::vector<Real>& dx, std::vector<Real>& dw) const {
      for (size_t k = 0; k < dx_.size(); ++k) dx[k] += dx_[k];
      for (size_t k = 0; k < dw_.size(); ++k) dw[k] += dw_[k];
    }

   private:
    const std::vector<double>&x_, &w_;
    int64_t d_;
    std::vector<double> dx_, dw_;
  };
  static std::vector<double> magnitudes_in_double(const std::vector<Real>& values) {
    std::vector<double> sizes;
    for (const Real x : values) sizes.push_back(static_cast<double>(std::fabs(x)));
    return sizes;
  }
  static std::vector<Real> magnitudes(std::vector<Real> values) {
    for (Real& x : values) x = std::fabs(x);
    return values;
  }
  // p and 1 are both about 1: their difference carries the rounding of each, and p that of its
  // logit.
  void subtraction(int64_t t, Real s) {
    if (!c_.in.targets.present()) return;
    const int64_t y = c_.in.targets.integer(t);
    const auto row = static_cast<size_t>(t);
    const Real size = subtracted_[row] * (2 + a_.row_largest[row]);
    a_.db_subtracted[static_cast<size_t>(y)] += size;
    for (int64_t i = 0; i < d_; ++i) {
      a_.dx_subtracted[at(t, i)] += size * std::fabs(s * w_[at(y, i)]);
      a_.dw_subtracted[at(y, i)] += size * std::fabs(s * x_[at(t, i)]);
    }
  }

  bool rows_alike() const {
    for (int64_t v = 1; v < v_; ++v)
      for (int64_t i = 0; i < d_; ++i)
        if (w_[at(v, i)] != w_[at(0, i)]) return false;
    return true;
  }

  void products() {
    const int64_t stored = c_.vocab_stored();
    a_.dx.assign(static_cast<size_t>(n_ * d_), 0);
    a_.dw.assign(static_cast<size_t>(stored * d_), 0);
    a_.db.assign(static_cast<size_t>(stored), 0);
    for (int64_t v = 0; c_.accumulate_dw && v < stored; ++v)
      for (int64_t i = 0; i < d_; ++i) a_.dw[static_cast<size_t>(v * d_ + i)] = c_.out.dw.get(v, i);
    for (int64_t v = 0; c_.accumulate_db && v < stored; ++v)
      a_.db[static_cast<size_t>(v)] = c_.out.db.get(v);
    a_.dx_floor.assign(a_.dx.size(), 0);
    a_.dx_subtracted = a_.dx_floor;
    a_.dw_subtracted.assign(a_.dw.size(), 0);
    a_.db_subtracted.assign(a_.db.size(), 0);
    a_.dw_floor = magnitudes(a_.dw);
    a_.db_floor = magnitudes(a_.db);
    if (walks_) a_.dx_walk = a_.dx_floor, a_.dw_walk = a_.dw_floor, a_.db_walk = a_.db_floor;
    // The roundings of a sum of n terms are a walk of sqrt(n) steps; equal terms round alike, and
    // what is left of n of them are n / 8 roundings at the worst.
    a_.rows_alike = rows_alike();
    a_.sizes.assign(a_.dz.size(), 0);
    a_.factors.assign(a_.dz.size(), 0);
    const Real over_tokens = std::sqrt(Real(n_));
    const Real over_vocab = std::max(std::sqrt(Real(v_)), a_.rows_alike ? Real(v_) / 8 : Real(0));
    const std::vector<double> x_sizes(magnitudes_in_double(x_)), w_sizes(magnitudes_in_double(w_));
    Sizes floors(x_sizes, w_sizes, d_), walks = floors;
    for (int64_t t = 0; c_.backward() && t < n_; ++t) {
      const Row kind = a_.rows[static_cast<size_t>(t)];
      if (kind == Row::poisoned) std::fill_n(a_.dx.begin() + t * d_, d_, nan);
      if (kind != Row::valid) continue;
      const Real s = Real(o_.logit_scale) * value(c_.in.token_scale, t, 1);
      for (int64_t v = 0; v < v_; ++v) {
        const auto cell = static_cast<size_t>(t * v_ + v);
        const Real da = a_.dz[cell] * slope_[cell];
        // Without the factor of the softcap, which eager arithmetic forms as a difference.
        const Real logit = 1 + a_.row_largest[static_cast<size_t>(t)];
        // Below the smallest normal number of fp32 a rounding is as large as there.
        const Real size = dz_size_[cell] > 0 ? std::max(dz_size_[cell], smallest) : Real(0);
        a_.sizes[cell] = dz_size_[cell] * std::fabs(s);
        a_.factors[cell] = std::fabs(s * da);
        a_.db[static_cast<size_t>(v)] += da;
        a_.db_floor[static_cast<size_t>(v)] += size * (logit + over_tokens);
        const Real *x = x_.data() + at(t, 0), *w = w_.data() + at(v, 0);
        Real *dx = a_.dx.data() + at(t, 0), *dw = a_.dw.data() + at(v, 0);
        for (int64_t i = 0; i < d_; ++i) dx[i] += s * da * w[i], dw[i] += s * da * x[i];
        const Real scaled = size * std::fabs(s);
        floors.add(t, v, scaled * (logit + over_vocab), scaled * (logit + over_tokens));
        if (!walks_) continue;
        const Real walked = 1 + 5 * term_walk_[cell];
        a_.db_walk[static_cast<size_t>(v)] += size * (walked + over_tokens);
        walks.add(t, v, scaled * (walked + over_vocab), scaled * (walked + over_tokens));
      }
      subtraction(t, s);
    }
    floors.to(a_.dx_floor, a_.dw_floor);
    if (walks_) walks.to(a_.dx_walk, a_.dw_walk);
  }

  const Case& c_;
  const LinearCrossEntropyOptions& o_;
  int64_t n_, d_, v_;
  Mean mean_;
  Real class_sum_ = 0;
  const bool walks_ = c_.in.hidden.dtype() == DType::f32;
  std::vector<Real> x_, w_, slope_, token_loss_, dz_size_, subtracted_, term_walk_, logit_walk_;
  Answer a_;
};

}  // namespace

Answer oracle(const Case& c) { return Oracle(c).solve(); }

std::vector<Row> classify(const Case& c) {
  std::vector<Row> rows(static_cast<size_t>(c.tokens()), Row::valid);
  const int64_t ignore = c.options.ignore_index;
  for (int64_t t = 0; t < c.tokens(); ++t) {
    Row& kind = rows[static_cast<size_t>(t)];
    if (c.in.targets.present()) {
      const int64_t y = c.in.targets.integer(t);
      kind = y == ignore ? Row::ignored : y < 0 || y >= c.vocab() ? Row::poisoned : Row::valid;
    } else if (c.in.soft_target_ids.present() && c.in.soft_target_ids.shape()[1] > 0) {
      const int64_t k = c.in.soft_target_ids.shape()[1];
      int64_t ignored = 0, foreign = 0;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t id = c.in.soft_target_ids.integer(t, j);
        ignored += id == ignore;
        foreign += id < 0 || id >= c.vocab();
      }
      kind = ignored == k ? Row::ignored : foreign > 0 ? Row::poisoned : Row::valid;
    }
  }
  return rows;
}

Mean mean_of(const Case& c, const std::vector<Row>& rows) {
  Real plain = 0, weighted = 0;
  Mean mean{1, true};
  for (int64_t t = 0; t < c.tokens(); ++t) {
    const Row kind = rows[static_cast<size_t>(t)];
    if (kind == Row::ignored) continue;
    mean.empty = false;
    // A poisoned row still counts: the batch is not quietly made smaller.
    const bool classed = kind == Row::valid && c.in.targets.present();
    const Real cy = classed ? value(c.in.class_weight, c.in.targets.integer(t), 1) : Real(1);
    plain += cy;
    weighted += cy * value(c.in.token_weight, t, 1);
  }
  if (c.options.reduction != Reduction::mean) return mean;
  mean.denominator = c.options.denominator == Denominator::valid      ? plain
                     : c.options.denominator == Denominator::weighted ? weighted
                                                                      : c.options.denominator_value;
  return mean;
}

std::vector<Real> distribution(const Case& c, int64_t t) {
  std::vector<Real> q(static_cast<size_t>(c.vocab()), 0);
  const Array& probs = c.in.soft_target_probs;
  if (!c.in.soft_target_ids.present()) {
    for (int64_t v = 0; v < c.vocab(); ++v) q[static_cast<size_t>(v)] = probs.get(t, v);
    return q;
  }
  for (int64_t j = 0; j < probs.shape()[1]; ++j)
    q[static_cast<size_t>(c.in.soft_target_ids.integer(t, j))] += probs.get(t, j);
  return q;
}

}  // namespace talea::testing
