// What: the same case as eager code gets it: gathered rows, fp32 sums, one rounding an operand.
// Why: a lane must be no worse than what it replaces.
// Never: shares code with src or with the oracle's formulas.
#include <algorithm>
#include <cmath>

#include "yardsticks/sparse_attention/oracle.hpp"

namespace talea::yardsticks::sparse_attention {
namespace {

template <typename T>
struct Gathered {
  std::vector<int64_t> row;
  std::vector<T> k;  // [valid, D]
};

template <typename T>
class Eager {
 public:
  explicit Eager(const Case& c)
      : c_(c), d_(static_cast<size_t>(c.dim())), v_(static_cast<size_t>(c.value_dim())) {
    operand_ = c.q.dtype() == DType::f8_e4m3 ? DType::bf16 : c.q.dtype();
  }

  Numbers run() {
    const auto rows = static_cast<size_t>(c_.batch() * c_.queries() * c_.heads());
    n_.lse.assign(rows, 0);
    n_.row_max.assign(rows, 0);
    n_.o.assign(rows * v_, 0);
    n_.dq.assign(rows * d_, 0);
    dkv_.assign(static_cast<size_t>(c_.kv.shape()[0] * c_.kv.shape()[1] * c_.groups() * c_.dim()),
                0);
    n_.d_sink.assign(static_cast<size_t>(c_.heads()), 0);
    const int64_t share = c_.heads() / c_.groups();
    for (int64_t b = 0; b < c_.batch(); ++b)
      for (int64_t s = 0; s < c_.queries(); ++s)
        for (int64_t g = 0; g < c_.groups(); ++g) {
          gather(b, s, g);
          for (int64_t h = g * share; h < (g + 1) * share; ++h) head(b, s, g, h);
        }
    n_.dkv.resize(dkv_.size());
    const std::vector<double> before = c_.dkv_before.numbers();
    for (size_t i = 0; i < dkv_.size(); ++i)
      n_.dkv[i] = rounded(
          c_.dkv_dtype,
          static_cast<double>(c_.accumulate ? dkv_[i] + static_cast<T>(before[i]) : dkv_[i]));
    return n_;
  }

 private:
  T once(T x) const {
    return size_of(operand_) == 2 ? static_cast<T>(rounded(operand_, static_cast<double>(x))) : x;
  }

  void gather(int64_t b, int64_t s, int64_t g) {
    keys_.row.clear();
    keys_.k.clear();
    const bool fp8 = c_.options.kv_storage != sa::KvStorage::plain;
    for (int64_t k = 0; k < c_.slots(); ++k) {
      const int64_t row = named_row(c_, b, s, g, k);
      if (row < 0) continue;
      keys_.row.push_back(row);
      for (int64_t x = 0; x < c_.dim(); ++x) {
        const double value = kv_value(c_, row, g, x);
        keys_.k.push_back(static_cast<T>(fp8 ? rounded(DType::bf16, value) : value));
      }
    }
  }

  void head(int64_t b, int64_t s, int64_t g, int64_t h) {
    const size_t count = keys_.row.size();
    const auto at = static_cast<size_t>((b * c_.queries() + s) * c_.heads() + h);
    std::vector<T> q(d_), score(count), p(count), o(v_);
    for (size_t x = 0; x < d_; ++x) {
      const double value = q_value(c_, b, s, h, static_cast<int64_t>(x));
      q[x] = static_cast<T>(c_.q_scale ? rounded(DType::bf16, value) : value);
    }
    const auto scale = static_cast<T>(c_.scale());
    T max = -INFINITY, sum = 0;
    for (size_t i = 0; i < count; ++i) {
      for (size_t x = 0; x < d_; ++x) score[i] += q[x] * keys_.k[i * d_ + x];
      score[i] *= scale;
      max = score[i] > max || std::isnan(score[i]) ? score[i] : max;
    }
    for (size_t i = 0; i < count; ++i) sum += p[i] = std::exp(score[i] - max);
    const T sink = c_.sink ? static_cast<T>(c_.sink.get(h)) : static_cast<T>(-INFINITY);
    const T whole = sum + std::exp(sink - max);
    for (size_t i = 0; i < count; ++i) {
      const T weight = once(p[i] / whole);
      for (size_t x = 0; x < v_; ++x) o[x] += weight * keys_.k[i * d_ + x];
    }
    n_.lse[at] = count ? static_cast<double>(max + std::log(sum)) : INFINITY;
    n_.row_max[at] = static_cast<double>(max);
    for (size_t x = 0; x < v_; ++x)
      n_.o[at * v_ + x] = rounded(c_.o_dtype, static_cast<double>(o[x]));
    if (c_.backward() && count) gradients(b, s, g, h, q, score, {max, sum, whole, sink});
  }

  struct Softmax {
    T max, sum, whole, sink;
  };

  void gradients(int64_t b, int64_t s, int64_t g, int64_t h, const std::vector<T>& q,
                 const std::vector<T>& score, const Softmax& f) {
    const auto at = static_cast<size_t>((b * c_.queries() + s) * c_.heads() + h);
    const auto scale = static_cast<T>(c_.scale());
    std::vector<T> d_o(v_), dq(d_);
    T delta = 0;
    for (size_t x = 0; x < v_ && c_.d_o; ++x) {
      d_o[x] = static_cast<T>(c_.d_o.get(b, s, h, static_cast<int64_t>(x)));
      delta += static_cast<T>(n_.o[at * v_ + x]) * d_o[x];
    }
    for (size_t i = 0; i < keys_.row.size(); ++i) {
      const T* k = keys_.k.data() + i * d_;
      const T e = std::exp(score[i] - f.max), weight = e / f.whole;
      T dp = 0;
      for (size_t x = 0; x < v_; ++x) dp += d_o[x] * k[x];
      T ds = weight * (dp - delta);
      if (c_.d_lse) ds += e / f.sum * static_cast<T>(c_.d_lse.get(b, s, h));
      ds = once(ds);
      T* to = dkv_.data() + (keys_.row[i] * c_.groups() + g) * c_.dim();
      for (size_t x = 0; x < d_; ++x) {
        dq[x] += ds * k[x];
        to[x] += scale * ds * q[x] + (x < v_ ? once(weight) * d_o[x] : 0);
      }
    }
    for (size_t x = 0; x < d_; ++x)
      n_.dq[at * d_ + x] = rounded(c_.dq_dtype, static_cast<double>(scale * dq[x]));
    n_.d_sink[static_cast<size_t>(h)] -=
        static_cast<double>(std::exp(f.sink - f.max) / f.whole * delta);
  }

  const Case& c_;
  size_t d_, v_;
  DType operand_;
  Gathered<T> keys_;
  std::vector<T> dkv_;
  Numbers n_;
};

}  // namespace

Numbers eager(const Case& c) {
  return c.q.dtype() == DType::f64 ? Eager<double>(c).run() : Eager<float>(c).run();
}

}  // namespace talea::yardsticks::sparse_attention
