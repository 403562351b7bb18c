// What: the transformer: embedding, blocks, final norm, head.
// Why: the shape of the models whose training the loss must keep on its way.
// Never: normalises or scales anything outside what the header of issue and docs state.
#include "train/model.hpp"

#include <cmath>

#include "core/fail.hpp"
#include "train/layers.hpp"
#include "train/product.hpp"
#include "train/random.hpp"

namespace talea::train {
namespace {

// x -> x + mixer(norm(x)) -> + down(silu(gate) * up) of the second norm.
template <typename T>
class Block {
 public:
  Block(const ModelConfig& c, int index, int threads, Layout& layout)
      : name_(fmt::format("block{}", index)),
        d_(c.hidden),
        f_(c.ffn),
        eps_(c.norm_eps),
        threads_(threads) {
    const double scale = 1 / std::sqrt(double(d_));
    norm1_ = layout.add(name_ + ".norm1", 1, d_, 0);
    mixer_ = make_mixer<T>(c, name_ + ".mixer", threads, layout);
    norm2_ = layout.add(name_ + ".norm2", 1, d_, 0);
    gate_w_ = layout.add(name_ + ".gate", f_, d_, scale);
    up_w_ = layout.add(name_ + ".up", f_, d_, scale);
    down_w_ =
        layout.add(name_ + ".down", d_, f_, 1 / std::sqrt(2.0 * double(c.layers) * double(f_)));
  }

  // x [tokens, hidden] is replaced by the block's output.
  void forward(std::vector<T>& x, const T* params, const MixerShape& s, Trace* trace) {
    const int64_t n = s.tokens();
    const Named named(trace, name_ + ".");
    resize(n);
    in_ = x;
    rms_norm(n1_.data(), inverse1_.data(), in_.data(), params + norm1_, eps_, {n, d_});
    record(trace, "norm1", n1_.data(), n * d_);
    mixer_->forward(middle_.data(), params, n1_.data(), s, trace);
    record(trace, "mixer", middle_.data(), n * d_);
    add(middle_.data(), in_.data(), n * d_);
    rms_norm(n2_.data(), inverse2_.data(), middle_.data(), params + norm2_, eps_, {n, d_});
    record(trace, "norm2", n2_.data(), n * d_);
    product_nt(gate_.data(), n2_.data(), params + gate_w_, {n, f_, d_}, false, threads_);
    product_nt(up_.data(), n2_.data(), params + up_w_, {n, f_, d_}, false, threads_);
    swiglu(act_.data(), gate_.data(), up_.data(), n * f_);
    record(trace, "swiglu", act_.data(), n * f_);
    product_nt(x.data(), act_.data(), params + down_w_, {n, d_, f_}, false, threads_);
    add(x.data(), middle_.data(), n * d_);
    record(trace, "out", x.data(), n * d_);
  }

  // dx is the gradient of the output on entry and of the input on return.
  void backward(std::vector<T>& dx, T* grads, const T* params, const MixerShape& s, Trace* trace) {
    const int64_t n = s.tokens();
    const Named named(trace, name_ + ".");
    product_tn(grads + down_w_, dx.data(), act_.data(), {d_, f_, n}, true, threads_);
    product_nn(dact_.data(), dx.data(), params + down_w_, {n, f_, d_}, false, threads_);
    record(trace, "d swiglu", dact_.data(), n * f_);
    swiglu_backward(dgate_.data(), dup_.data(), dact_.data(), gate_.data(), up_.data(), n * f_);
    product_tn(grads + gate_w_, dgate_.data(), n2_.data(), {f_, d_, n}, true, threads_);
    product_tn(grads + up_w_, dup_.data(), n2_.data(), {f_, d_, n}, true, threads_);
    product_nn(dn_.data(), dgate_.data(), params + gate_w_, {n, d_, f_}, false, threads_);
    product_nn(dn_.data(), dup_.data(), params + up_w_, {n, d_, f_}, true, threads_);
    rms_norm_backward(dx.data(), grads + norm2_, dn_.data(), middle_.data(), inverse2_.data(),
                      params + norm2_, {n, d_});
    record(trace, "d middle", dx.data(), n * d_);
    mixer_->backward(dn_.data(), grads, params, dx.data(), n1_.data(), s, trace);
    rms_norm_backward(dx.data(), grads + norm1_, dn_.data(), in_.data(), inverse1_.data(),
                      params + norm1_, {n, d_});
    record(trace, "d in", dx.data(), n * d_);
  }

 private:
  // Lengthens the trace's prefix while a block runs.
  struct Named {
    Named(Trace* t, const std::string& name) : trace(t), before(t ? t->prefix : "") {
      if (trace) trace->prefix += name;
    }
    ~Named() {
      if (trace) trace->prefix = before;
    }
    Trace* trace;
    std::string before;
  };

  void resize(int64_t n) {
    for (auto* v : {&n1_, &middle_, &n2_, &dn_}) v->resize(static_cast<size_t>(n * d_));
    for (auto* v : {&gate_, &up_, &act_, &dact_, &dgate_, &dup_})
      v->resize(static_cast<size_t>(n * f_));
    for (auto* v : {&inverse1_, &inverse2_}) v->resize(static_cast<size_t>(n));
  }

  std::string name_;
  int64_t d_, f_;
  double eps_;
  int threads_;
  int64_t norm1_, norm2_, gate_w_, up_w_, down_w_;
  std::unique_ptr<Mixer<T>> mixer_;
  std::vector<T> in_, n1_, inverse1_, middle_, n2_, inverse2_, gate_, up_, act_;
  std::vector<T> dact_, dgate_, dup_, dn_;
};

template <typename T>
class Transformer : public Model<T> {
 public:
  Transformer(const ModelConfig& c, int threads) : c_(c) {
    Layout& layout = this->layout_;
    // A tied table is the head too, whose logits want small rows.
    const double table_scale = c.tied ? 1 / std::sqrt(double(c.hidden)) : 1;
    table_ = layout.add("embedding", c.vocab, c.hidden, table_scale);
    for (int i = 0; i < c.layers; ++i) blocks_.emplace_back(c, i, threads, layout);
    norm_ = layout.add("final_norm", 1, c.hidden, 0);
    head_ =
        c.tied ? table_ : layout.add("head", c.vocab, c.hidden, 1 / std::sqrt(double(c.hidden)));
  }

  HeadResult<T> step(T* grads, const T* params, const Batch& batch, const LossShare& share,
                     Loss<T>& loss, Trace* trace) override {
    const MixerShape s{batch.sequences, batch.seq_len, c_.hidden};
    const int64_t n = s.tokens(), d = c_.hidden;
    const Rows rows{n, d};
    for (auto* v : {&x_, &normed_, &dnormed_}) v->resize(static_cast<size_t>(n * d));
    inverse_.resize(static_cast<size_t>(n));
    embedding(x_.data(), params + table_, batch.inputs.data(), rows);
    record(trace, "embedding", x_.data(), n * d);
    for (Block<T>& b : blocks_) b.forward(x_, params, s, trace);
    rms_norm(normed_.data(), inverse_.data(), x_.data(), params + norm_, c_.norm_eps, rows);
    record(trace, "final_norm", normed_.data(), n * d);
    const bool backward = grads != nullptr;
    HeadResult<T> result =
        loss.run({n, d, c_.vocab, normed_.data(), params + head_, &batch, share,
                  backward ? dnormed_.data() : nullptr, backward ? grads + head_ : nullptr});
    result.hidden = normed_;
    record(trace, "head: lse", result.lse.data(), n);
    record(trace, "head: logp", result.logp.data(), static_cast<int64_t>(result.logp.size()));
    record(trace, "head: loss", &result.loss, 1);
    if (!backward) return result;
    record(trace, "head: dx", dnormed_.data(), n * d);
    record(trace, "head: dw", grads + head_, c_.vocab * d);
    dx_.assign(static_cast<size_t>(n * d), T(0));
    rms_norm_backward(dx_.data(), grads + norm_, dnormed_.data(), x_.data(), inverse_.data(),
                      params + norm_, rows);
    record(trace, "d final_norm", dx_.data(), n * d);
    for (auto b = blocks_.rbegin(); b != blocks_.rend(); ++b)
      b->backward(dx_, grads, params, s, trace);
    embedding_backward(grads + table_, dx_.data(), batch.inputs.data(), rows);
    return result;
  }

 private:
  ModelConfig c_;
  int64_t table_, norm_, head_;
  std::vector<Block<T>> blocks_;
  std::vector<T> x_, normed_, inverse_, dnormed_, dx_;
};

}  // namespace

template <typename T>
std::unique_ptr<Model<T>> make_model(const ModelConfig& c, int threads) {
  require(c.vocab > 0 && c.hidden > 0 && c.ffn > 0 && c.layers >= 0, ErrorKind::usage,
          "model: vocab {}, hidden {}, ffn {} and layers {} must be positive", c.vocab, c.hidden,
          c.ffn, c.layers);
  if (c.form == "tiny") return make_tiny<T>(c, threads);
  require(c.form == "transformer", ErrorKind::usage,
          "model form = {}: no such form (transformer, tiny)", c.form);
  return std::make_unique<Transformer<T>>(c, threads);
}

template <typename T>
std::vector<T> initial_parameters(const Layout& layout, uint64_t seed) {
  std::vector<T> params(static_cast<size_t>(layout.size()));
  const Random random(seed, 1);
  for (const Slice& s : layout.slices())
    for (int64_t i = 0; i < s.size(); ++i) {
      const auto at = static_cast<uint64_t>(s.offset + i);
      params[at] = s.init_scale == 0
                       ? T(1)
                       : static_cast<T>(static_cast<float>(s.init_scale * random.normal(at)));
    }
  return params;
}

template std::unique_ptr<Model<float>> make_model(const ModelConfig&, int);
template std::unique_ptr<Model<double>> make_model(const ModelConfig&, int);
template std::vector<float> initial_parameters(const Layout&, uint64_t);
template std::vector<double> initial_parameters(const Layout&, uint64_t);

}  // namespace talea::train
