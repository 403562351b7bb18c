// What: plain same-dtype eager arithmetic on the host.
// Why: the second yardstick; p - 1 by subtraction and rounded logits are on purpose.
// Never: includes anything of src/.
#include "yardsticks/linear_cross_entropy/eager.hpp"

#include <algorithm>
#include <cmath>

namespace talea::testing {
namespace {

template <typename T>
class Eager {
 public:
  Eager(const Case& c, bool backwards)
      : c_(c), o_(c.options), n_(c.tokens()), d_(c.hidden()), v_(c.vocab()), back_(backwards) {}

  Answer solve() {
    a_.rows = classify(c_);
    mean_ = mean_of(c_, a_.rows);
    for (int64_t v = 0; v < v_; ++v) class_sum_ += T(weight_of(v));
    const auto n = static_cast<size_t>(n_);
    a_.logits.assign(n * static_cast<size_t>(v_), 0);
    a_.dz = a_.logits;
    a_.lse.assign(n, 0);
    a_.target_logprob = a_.entropy = a_.lse;
    token_loss_ = a_.lse;
    x_ = read(c_.in.hidden, n_);
    w_ = read(c_.in.weight, v_);
    for (int64_t t = 0; t < n_; ++t)
      if (a_.rows[static_cast<size_t>(t)] == Row::valid) row(t);
    reduce();
    if (c_.backward()) products();
    return std::move(a_);
  }

 private:
  // The framework's tensors between operators have the dtype of hidden.
  Real store(T x) const { return rounded(c_.in.hidden.dtype(), x); }
  Real weight_of(int64_t v) const {
    return c_.in.class_weight.present() ? c_.in.class_weight.get(v) : 1;
  }
  T scale_of(int64_t t) const {
    return T(o_.logit_scale) * (c_.in.token_scale.present() ? T(c_.in.token_scale.get(t)) : T(1));
  }
  static T value(const Array& a, int64_t t, T otherwise) {
    return a.present() ? T(a.get(t)) : otherwise;
  }

  std::vector<T> read(const Array& a, int64_t rows) const {
    std::vector<T> values(static_cast<size_t>(rows * d_));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < d_; ++i) values[static_cast<size_t>(r * d_ + i)] = T(a.get(r, i));
    return values;
  }

  // f over 0 .. count in this yardstick's order.
  template <typename F>
  T sum(int64_t count, F f) const {
    T total = 0;
    for (int64_t k = 0; k < count; ++k) total += f(nth(k, count));
    return total;
  }
  int64_t nth(int64_t k, int64_t count) const { return back_ ? count - 1 - k : k; }

  void row(int64_t t) {
    const auto r = static_cast<size_t>(t);
    Real* z = a_.logits.data() + t * v_;
    T max = -INFINITY;
    for (int64_t v = 0; v < v_; ++v) {
      const T dot = sum(d_, [&](int64_t i) {
        return x_[static_cast<size_t>(t * d_ + i)] * w_[static_cast<size_t>(v * d_ + i)];
      });
      T a = T(store(dot));
      if (scale_of(t) != T(1)) a = T(store(scale_of(t) * a));
      if (c_.in.bias.present()) a = T(store(a + T(c_.in.bias.get(v))));
      const T k = T(o_.softcap);
      if (k > T(0)) a = T(store(k * std::tanh(a / k)));
      z[v] = a;
      max = std::max(max, a);
    }
    const T total = sum(v_, [&](int64_t v) { return std::exp(T(z[v]) - max); });
    const T lse = max + std::log(total);
    a_.lse[r] = lse;
    const T entropy = sum(v_, [&](int64_t v) {
      const T p = std::exp(T(z[v]) - lse);
      return p > T(0) ? -p * (T(z[v]) - lse) : T(0);
    });
    a_.entropy[r] = entropy;
    loss(t, z, lse);
    gradient(t, z, lse, entropy);
  }

  void loss(int64_t t, const Real* z, T lse) {
    const T eps = T(o_.label_smoothing);
    T ce = 0;
    if (c_.in.targets.present()) {
      const int64_t y = c_.in.targets.integer(t);
      const T logp = T(z[y]) - lse;
      a_.target_logprob[static_cast<size_t>(t)] = logp;
      ce = (T(1) - eps) * T(weight_of(y)) * -logp;
    }
    const bool soft = c_.in.soft_target_probs.present();
    if (soft) {
      const auto q = distribution(c_, t);
      ce += (T(1) - eps) * sum(v_, [&](int64_t v) {
              const T share = T(q[static_cast<size_t>(v)]);
              return share == T(0) ? T(0) : T(weight_of(v)) * share * (lse - T(z[v]));
            });
    }
    if (eps > T(0) && (soft || c_.in.targets.present()))
      ce += eps / T(v_) * sum(v_, [&](int64_t v) { return T(weight_of(v)) * (lse - T(z[v])); });
    token_loss_[static_cast<size_t>(t)] =
        value(c_.in.token_weight, t, 1) * (ce + T(o_.z_loss) * lse * lse);
  }

  void gradient(int64_t t, const Real* z, T lse, T entropy) {
    const bool soft = c_.in.soft_target_probs.present(), hard = c_.in.targets.present();
    const T eps = T(o_.label_smoothing);
    const int64_t y = hard ? c_.in.targets.integer(t) : -1;
    const auto q = soft ? distribution(c_, t) : std::vector<Real>();
    T mass = hard ? T(weight_of(y)) : T(0);
    if (soft)
      mass = sum(v_, [&](int64_t v) { return T(weight_of(v)) * T(q[static_cast<size_t>(v)]); });
    const bool vector = c_.in.upstream.present() && !c_.in.upstream.shape().empty();
    const T up = c_.in.upstream.present() ? T(c_.in.upstream.get(vector ? t : 0)) : T(1);
    const T g = soft || hard ? up * value(c_.in.token_weight, t, 1) / T(mean_.denominator) : T(0);
    const T smooth = eps / T(v_);
    for (int64_t v = 0; v < v_; ++v) {
      const T p = std::exp(T(z[v]) - lse), c = T(weight_of(v));
      T inner = (T(1) - eps) * mass * p + smooth * class_sum_ * p;
      if (v == y) inner -= (T(1) - eps) * c;  // the subtraction that loses the digits
      if (soft) inner -= (T(1) - eps) * c * T(q[static_cast<size_t>(v)]);
      T dz = g * (inner - smooth * c + T(2) * T(o_.z_loss) * lse * p);
      dz += value(c_.in.upstream_lse, t, 0) * p;
      if (p > T(0)) dz -= value(c_.in.upstream_entropy, t, 0) * p * (T(z[v]) - lse + entropy);
      const T k = T(o_.softcap);
      if (k > T(0)) dz *= T(1) - (T(z[v]) / k) * (T(z[v]) / k);
      a_.dz[static_cast<size_t>(t * v_ + v)] = store(dz);
    }
  }

  void reduce() {
    if (o_.reduction == Reduction::none) {
      a_.loss = token_loss_;
      return;
    }
    const T total = sum(n_, [&](int64_t t) { return T(token_loss_[static_cast<size_t>(t)]); });
    a_.loss = {o_.reduction == Reduction::sum ? Real(total) : Real(total / T(mean_.denominator))};
  }

  void products() {
    const int64_t stored = c_.vocab_stored();
    const auto da = [&](int64_t t, int64_t v) { return T(a_.dz[static_cast<size_t>(t * v_ + v)]); };
    a_.dx.assign(static_cast<size_t>(n_ * d_), 0);
    a_.dw.assign(static_cast<size_t>(stored * d_), 0);
    a_.db.assign(static_cast<size_t>(stored), 0);
    std::vector<T> row(size_t(d_), 0);  // each element's sum in its order, all columns at once
    const auto add = [&](T factor, const std::vector<T>& rows, int64_t at) {
      for (int64_t i = 0; i < d_; ++i) row[size_t(i)] += factor * rows[size_t(at * d_ + i)];
    };
    for (int64_t t = 0; t < n_ && c_.out.dx.present(); ++t) {
      std::fill(row.begin(), row.end(), T(0));
      for (int64_t k = 0; k < v_; ++k) add(da(t, nth(k, v_)), w_, nth(k, v_));
      for (int64_t i = 0; i < d_; ++i)
        a_.dx[size_t(t * d_ + i)] = rounded(c_.out.dx.dtype(), scale_of(t) * row[size_t(i)]);
    }
    for (int64_t v = 0; v < stored && c_.out.dw.present(); ++v) {
      std::fill(row.begin(), row.end(), T(0));
      for (int64_t k = 0; v < v_ && k < n_; ++k) {
        const int64_t t = nth(k, n_);
        if (a_.rows[size_t(t)] == Row::valid) add(scale_of(t) * da(t, v), x_, t);
      }
      for (int64_t i = 0; i < d_; ++i) {
        T total = row[size_t(i)];
        if (c_.accumulate_dw) total += T(c_.out.dw.get(v, i));
        a_.dw[size_t(v * d_ + i)] = rounded(c_.out.dw.dtype(), total);
      }
    }
    for (int64_t v = 0; v < stored && c_.out.db.present(); ++v) {
      T total = v >= v_ ? T(0) : sum(n_, [&](int64_t t) { return da(t, v); });
      if (c_.accumulate_db) total += T(c_.out.db.get(v));
      a_.db[static_cast<size_t>(v)] = rounded(c_.out.db.dtype(), total);
    }
  }

  const Case& c_;
  const LinearCrossEntropyOptions& o_;
  int64_t n_, d_, v_;
  bool back_;
  Mean mean_;
  T class_sum_ = 0;
  std::vector<T> x_, w_;
  std::vector<Real> token_loss_;
  Answer a_;
};

}  // namespace

Answer eager(const Case& c, bool backwards) {
  if (c.in.hidden.dtype() == DType::f64) return Eager<double>(c, backwards).solve();
  return Eager<float>(c, backwards).solve();
}

}  // namespace talea::testing
