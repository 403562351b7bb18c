// What: the form without attention: embedding, RMSNorm, linear (gate and up), SwiGLU, linear.
// Why: the smallest model whose every tensor can be followed by hand; its last linear is the head.
// Never: mixes tokens: each next byte is guessed from the one before it.
#include <cmath>

#include "train/layers.hpp"
#include "train/model.hpp"
#include "train/product.hpp"

namespace talea::train {
namespace {

template <typename T>
class Tiny : public Model<T> {
 public:
  Tiny(const ModelConfig& c, int threads) : c_(c), threads_(threads) {
    Layout& layout = this->layout_;
    const double scale = 1 / std::sqrt(double(c.hidden));
    table_ = layout.add("embedding", c.vocab, c.hidden, 1);
    norm_ = layout.add("norm", 1, c.hidden, 0);
    gate_w_ = layout.add("gate", c.ffn, c.hidden, scale);
    up_w_ = layout.add("up", c.ffn, c.hidden, scale);
    head_ = layout.add("head", c.vocab, c.ffn, 1 / std::sqrt(double(c.ffn)));
  }

  HeadResult<T> step(T* grads, const T* params, const Batch& batch, const LossShare& share,
                     Loss<T>& loss, Trace* trace) override {
    const int64_t n = batch.tokens(), d = c_.hidden, f = c_.ffn;
    for (auto* v : {&x_, &normed_, &dnormed_}) v->resize(static_cast<size_t>(n * d));
    for (auto* v : {&gate_, &up_, &act_, &dgate_, &dup_, &dact_})
      v->resize(static_cast<size_t>(n * f));
    inverse_.resize(static_cast<size_t>(n));
    embedding(x_.data(), params + table_, batch.inputs.data(), {n, d});
    record(trace, "embedding", x_.data(), n * d);
    rms_norm(normed_.data(), inverse_.data(), x_.data(), params + norm_, c_.norm_eps, {n, d});
    record(trace, "norm", normed_.data(), n * d);
    product_nt(gate_.data(), normed_.data(), params + gate_w_, {n, f, d}, false, threads_);
    product_nt(up_.data(), normed_.data(), params + up_w_, {n, f, d}, false, threads_);
    swiglu(act_.data(), gate_.data(), up_.data(), n * f);
    record(trace, "swiglu", act_.data(), n * f);
    const bool backward = grads != nullptr;
    HeadResult<T> result =
        loss.run({n, f, c_.vocab, act_.data(), params + head_, &batch, share,
                  backward ? dact_.data() : nullptr, backward ? grads + head_ : nullptr});
    result.hidden = act_;
    record(trace, "head: lse", result.lse.data(), n);
    record(trace, "head: logp", result.logp.data(), static_cast<int64_t>(result.logp.size()));
    record(trace, "head: loss", &result.loss, 1);
    if (!backward) return result;
    record(trace, "head: dx", dact_.data(), n * f);
    record(trace, "head: dw", grads + head_, c_.vocab * f);
    this->backward(grads, params, batch, trace);
    return result;
  }

 private:
  void backward(T* grads, const T* params, const Batch& batch, Trace* trace) {
    const int64_t n = batch.tokens(), d = c_.hidden, f = c_.ffn;
    swiglu_backward(dgate_.data(), dup_.data(), dact_.data(), gate_.data(), up_.data(), n * f);
    product_tn(grads + gate_w_, dgate_.data(), normed_.data(), {f, d, n}, true, threads_);
    product_tn(grads + up_w_, dup_.data(), normed_.data(), {f, d, n}, true, threads_);
    product_nn(dnormed_.data(), dgate_.data(), params + gate_w_, {n, d, f}, false, threads_);
    product_nn(dnormed_.data(), dup_.data(), params + up_w_, {n, d, f}, true, threads_);
    record(trace, "d norm", dnormed_.data(), n * d);
    dx_.assign(static_cast<size_t>(n * d), T(0));
    rms_norm_backward(dx_.data(), grads + norm_, dnormed_.data(), x_.data(), inverse_.data(),
                      params + norm_, {n, d});
    record(trace, "d embedding", dx_.data(), n * d);
    embedding_backward(grads + table_, dx_.data(), batch.inputs.data(), {n, d});
  }

  ModelConfig c_;
  int threads_;
  int64_t table_, norm_, gate_w_, up_w_, head_;
  std::vector<T> x_, normed_, inverse_, gate_, up_, act_, dgate_, dup_, dact_, dnormed_, dx_;
};

}  // namespace

template <typename T>
std::unique_ptr<Model<T>> make_tiny(const ModelConfig& config, int threads) {
  return std::make_unique<Tiny<T>>(config, threads);
}

template std::unique_ptr<Model<float>> make_tiny(const ModelConfig&, int);
template std::unique_ptr<Model<double>> make_tiny(const ModelConfig&, int);

}  // namespace talea::train
