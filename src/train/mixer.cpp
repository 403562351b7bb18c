// What: the table of mixers, and the running mean.
// Why: a second mixer keeps the interface honest.
// Never: knows a mixer's arithmetic beyond the running mean's own.
#include "train/mixer.hpp"

#include <cmath>

#include "core/fail.hpp"
#include "train/product.hpp"

namespace talea::train {
namespace {

template <typename T>
class RunningMean : public Mixer<T> {
 public:
  RunningMean(const ModelConfig& c, const std::string& prefix, int threads, Layout& layout)
      : threads_(threads),
        weight_(
            layout.add(prefix + ".weight", c.hidden, c.hidden, 1 / std::sqrt(double(c.hidden)))) {}

  void forward(T* y, const T* params, const T* x, const MixerShape& s, Trace* trace) override {
    const int64_t n = s.tokens(), d = s.hidden;
    product_nt(y, x, params + weight_, {n, d, d}, false, threads_);
    record(trace, "projected", y, n * d);
    for (int64_t q = 0; q < s.sequences; ++q) {
      sum_.assign(static_cast<size_t>(d), T(0));
      for (int64_t t = 0; t < s.seq_len; ++t)
        for (int64_t i = 0; i < d; ++i) {
          T& value = y[(q * s.seq_len + t) * d + i];
          sum_[i] += value;
          value = sum_[i] / T(t + 1);
        }
    }
  }

  void backward(T* dx, T* grads, const T* params, const T* dy, const T* x, const MixerShape& s,
                Trace*) override {
    const int64_t n = s.tokens(), d = s.hidden;
    dy_.resize(static_cast<size_t>(n * d));
    for (int64_t q = 0; q < s.sequences; ++q) {
      sum_.assign(static_cast<size_t>(d), T(0));
      for (int64_t t = s.seq_len - 1; t >= 0; --t)
        for (int64_t i = 0; i < d; ++i) {
          const int64_t at = (q * s.seq_len + t) * d + i;
          sum_[i] += dy[at] / T(t + 1);
          dy_[at] = sum_[i];
        }
    }
    product_tn(grads + weight_, dy_.data(), x, {d, d, n}, true, threads_);
    product_nn(dx, dy_.data(), params + weight_, {n, d, d}, false, threads_);
  }

 private:
  int threads_;
  int64_t weight_;
  std::vector<T> sum_, dy_;
};

}  // namespace

template <typename T>
std::unique_ptr<Mixer<T>> make_running_mean(const ModelConfig& config, const std::string& prefix,
                                            int threads, Layout& layout) {
  return std::make_unique<RunningMean<T>>(config, prefix, threads, layout);
}

std::vector<std::string> mixer_names() { return {"attention", "running-mean"}; }

template <typename T>
std::unique_ptr<Mixer<T>> make_mixer(const ModelConfig& config, const std::string& prefix,
                                     int threads, Layout& layout) {
  if (config.mixer == "attention") return make_attention<T>(config, prefix, threads, layout);
  if (config.mixer == "running-mean") return make_running_mean<T>(config, prefix, threads, layout);
  fail(ErrorKind::usage, "mixer = {}: no such mixer (attention, running-mean)", config.mixer);
}

template std::unique_ptr<Mixer<float>> make_mixer(const ModelConfig&, const std::string&, int,
                                                  Layout&);
template std::unique_ptr<Mixer<double>> make_mixer(const ModelConfig&, const std::string&, int,
                                                   Layout&);

}  // namespace talea::train
