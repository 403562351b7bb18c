// What: causal multi-head attention with rotary positions, forward and backward.
// Why: the mixer of the usual transformer block; sequences of parity runs are short.
// Never: looks at a later token: scores above the diagonal are not computed.
#include <cmath>

#include "core/fail.hpp"
#include "train/mixer.hpp"
#include "train/product.hpp"

namespace talea::train {
namespace {

template <typename T>
class Attention : public Mixer<T> {
 public:
  Attention(const ModelConfig& c, const std::string& prefix, int threads, Layout& layout)
      : heads_(c.heads),
        size_(c.heads > 0 ? c.hidden / c.heads : 0),
        threads_(threads),
        base_(c.rope_base) {
    require(c.heads > 0 && c.hidden % c.heads == 0 && size_ % 2 == 0, ErrorKind::usage,
            "heads = {}: must divide hidden = {} into heads of even size", c.heads, c.hidden);
    const double scale = 1 / std::sqrt(double(c.hidden));
    for (int i = 0; i < 3; ++i) in_[i] = layout.add(prefix + names[i], c.hidden, c.hidden, scale);
    out_ =
        layout.add(prefix + ".wo", c.hidden, c.hidden, scale / std::sqrt(2.0 * double(c.layers)));
  }

  void forward(T* y, const T* params, const T* x, const MixerShape& s, Trace* trace) override {
    const int64_t n = s.tokens(), d = s.hidden;
    prepare(s);
    for (int i = 0; i < 3; ++i)
      product_nt(qkv_[i].data(), x, params + in_[i], {n, d, d}, false, threads_);
    for (int i = 0; i < 2; ++i) rotate(qkv_[i].data(), s, T(1));
    record(trace, "query", qkv_[0].data(), n * d);
    record(trace, "key", qkv_[1].data(), n * d);
    record(trace, "value", qkv_[2].data(), n * d);
    each_head(s, [&](int64_t at, T* p) { attend(at, p, s); });
    record(trace, "probabilities", probs_.data(), static_cast<int64_t>(probs_.size()));
    product_nt(y, mixed_.data(), params + out_, {n, d, d}, false, threads_);
  }

  void backward(T* dx, T* grads, const T* params, const T* dy, const T* x, const MixerShape& s,
                Trace* trace) override {
    const int64_t n = s.tokens(), d = s.hidden;
    product_tn(grads + out_, dy, mixed_.data(), {d, d, n}, true, threads_);
    product_nn(dmixed_.data(), dy, params + out_, {n, d, d}, false, threads_);
    for (auto& g : dqkv_) std::fill(g.begin(), g.end(), T(0));
    each_head(s, [&](int64_t at, T* p) { attend_backward(at, p, s); });
    for (int i = 0; i < 2; ++i) rotate(dqkv_[i].data(), s, T(-1));
    record(trace, "d query", dqkv_[0].data(), n * d);
    record(trace, "d key", dqkv_[1].data(), n * d);
    record(trace, "d value", dqkv_[2].data(), n * d);
    for (int i = 0; i < 3; ++i) {
      product_tn(grads + in_[i], dqkv_[i].data(), x, {d, d, n}, true, threads_);
      product_nn(dx, dqkv_[i].data(), params + in_[i], {n, d, d}, i > 0, threads_);
    }
  }

 private:
  static constexpr const char* names[3] = {".wq", ".wk", ".wv"};

  void prepare(const MixerShape& s) {
    const auto count = static_cast<size_t>(s.tokens() * s.hidden);
    for (int i = 0; i < 3; ++i) {
      qkv_[i].resize(count);
      dqkv_[i].resize(count);
    }
    mixed_.resize(count);
    dmixed_.resize(count);
    probs_.assign(static_cast<size_t>(s.sequences * heads_ * s.seq_len * s.seq_len), T(0));
    dscore_.resize(static_cast<size_t>(s.seq_len));
    const int64_t half = size_ / 2, known = static_cast<int64_t>(cosine_.size()) / half;
    for (int64_t t = known; t < s.seq_len; ++t)
      for (int64_t i = 0; i < half; ++i) {
        const double angle = double(t) * std::pow(base_, -double(i) / double(half));
        cosine_.push_back(static_cast<T>(std::cos(angle)));
        sine_.push_back(static_cast<T>(std::sin(angle)));
      }
  }

  // Pairs (i, i + half) of every head turn by the position's angle; sign -1 is the transpose.
  void rotate(T* x, const MixerShape& s, T sign) const {
    const int64_t half = size_ / 2;
    for (int64_t t = 0; t < s.tokens(); ++t) {
      const T* c = cosine_.data() + (t % s.seq_len) * half;
      const T* n = sine_.data() + (t % s.seq_len) * half;
      for (int64_t h = 0; h < heads_; ++h) {
        T* v = x + t * s.hidden + h * size_;
        for (int64_t i = 0; i < half; ++i) {
          const T a = v[i], b = v[i + half];
          v[i] = a * c[i] - sign * b * n[i];
          v[i + half] = b * c[i] + sign * a * n[i];
        }
      }
    }
  }

  template <typename F>
  void each_head(const MixerShape& s, F work) {
    for (int64_t q = 0; q < s.sequences; ++q)
      for (int64_t h = 0; h < heads_; ++h)
        work(q * s.seq_len * s.hidden + h * size_,
             probs_.data() + (q * heads_ + h) * s.seq_len * s.seq_len);
  }

  T dot(const T* a, const T* b) const {
    T sum = 0;
    for (int64_t i = 0; i < size_; ++i) sum += a[i] * b[i];
    return sum;
  }

  void attend(int64_t at, T* p, const MixerShape& s) {
    const T scale = static_cast<T>(1 / std::sqrt(double(size_)));
    const T *q = qkv_[0].data() + at, *k = qkv_[1].data() + at, *v = qkv_[2].data() + at;
    for (int64_t t = 0; t < s.seq_len; ++t) {
      T* row = p + t * s.seq_len;
      T max = -INFINITY, sum = 0;
      for (int64_t u = 0; u <= t; ++u) {
        row[u] = scale * dot(q + t * s.hidden, k + u * s.hidden);
        if (row[u] > max) max = row[u];
      }
      for (int64_t u = 0; u <= t; ++u) sum += row[u] = std::exp(row[u] - max);
      T* o = mixed_.data() + at + t * s.hidden;
      for (int64_t i = 0; i < size_; ++i) o[i] = 0;
      for (int64_t u = 0; u <= t; ++u) {
        row[u] /= sum;
        for (int64_t i = 0; i < size_; ++i) o[i] += row[u] * v[u * s.hidden + i];
      }
    }
  }

  void attend_backward(int64_t at, const T* p, const MixerShape& s) {
    const T scale = static_cast<T>(1 / std::sqrt(double(size_)));
    const T *q = qkv_[0].data() + at, *k = qkv_[1].data() + at, *v = qkv_[2].data() + at;
    T *dq = dqkv_[0].data() + at, *dk = dqkv_[1].data() + at, *dv = dqkv_[2].data() + at;
    for (int64_t t = 0; t < s.seq_len; ++t) {
      const T* row = p + t * s.seq_len;
      const T* g = dmixed_.data() + at + t * s.hidden;
      T mean = 0;
      for (int64_t u = 0; u <= t; ++u) {
        dscore_[u] = dot(g, v + u * s.hidden);
        mean += row[u] * dscore_[u];
        for (int64_t i = 0; i < size_; ++i) dv[u * s.hidden + i] += row[u] * g[i];
      }
      for (int64_t u = 0; u <= t; ++u) {
        const T da = scale * row[u] * (dscore_[u] - mean);
        for (int64_t i = 0; i < size_; ++i) {
          dq[t * s.hidden + i] += da * k[u * s.hidden + i];
          dk[u * s.hidden + i] += da * q[t * s.hidden + i];
        }
      }
    }
  }

  int64_t heads_, size_;
  int threads_;
  double base_;
  int64_t in_[3], out_;
  std::vector<T> qkv_[3], dqkv_[3], mixed_, dmixed_, probs_, dscore_, cosine_, sine_;
};

}  // namespace

template <typename T>
std::unique_ptr<Mixer<T>> make_attention(const ModelConfig& config, const std::string& prefix,
                                         int threads, Layout& layout) {
  return std::make_unique<Attention<T>>(config, prefix, threads, layout);
}

template std::unique_ptr<Mixer<float>> make_attention(const ModelConfig&, const std::string&, int,
                                                      Layout&);
template std::unique_ptr<Mixer<double>> make_attention(const ModelConfig&, const std::string&, int,
                                                       Layout&);

}  // namespace talea::train
