// What: the model of a parity run: forward and hand-written backward of one micro-step.
// Why: one template in float (candidate) and double (reference precision) is one definition.
// Never: owns parameters or gradients; both are flat buffers laid out by layout().
#pragma once

#include <memory>

#include "train/loss.hpp"
#include "train/mixer.hpp"

namespace talea::train {

template <typename T>
class Model {
 public:
  virtual ~Model() = default;
  const Layout& layout() const { return layout_; }
  // Adds the gradients of `share` of the loss into grads; grads null: forward only.
  virtual HeadResult<T> step(T* grads, const T* params, const Batch& batch, const LossShare& share,
                             Loss<T>& loss, Trace* trace) = 0;

 protected:
  Layout layout_;
};

template <typename T>
std::unique_ptr<Model<T>> make_model(const ModelConfig& config, int threads);
template <typename T>
std::unique_ptr<Model<T>> make_tiny(const ModelConfig& config, int threads);

// Drawn in fp32, so that float and double models start from the same numbers.
template <typename T>
std::vector<T> initial_parameters(const Layout& layout, uint64_t seed);

}  // namespace talea::train
