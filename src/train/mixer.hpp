// What: the interface of a block's token mixer, and the table of mixers.
// Why: attention today, a sparse attention and a state-space mixer later, without touching model.
// Never: sees the loss, the optimizer or another block.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "train/config.hpp"
#include "train/layout.hpp"
#include "train/trace.hpp"

namespace talea::train {

struct MixerShape {
  int64_t sequences, seq_len, hidden;
  int64_t tokens() const { return sequences * seq_len; }
};

// One instance serves one block and keeps what its backward needs from its last forward.
template <typename T>
class Mixer {
 public:
  virtual ~Mixer() = default;
  // y [tokens, hidden] is overwritten. Token t may depend on tokens <= t of its sequence only.
  virtual void forward(T* y, const T* params, const T* x, const MixerShape& shape,
                       Trace* trace) = 0;
  // dx is overwritten; gradients are added to grads (laid out as params).
  virtual void backward(T* dx, T* grads, const T* params, const T* dy, const T* x,
                        const MixerShape& shape, Trace* trace) = 0;
};

// Declares its parameters in the layout under `prefix`.
template <typename T>
std::unique_ptr<Mixer<T>> make_mixer(const ModelConfig& config, const std::string& prefix,
                                     int threads, Layout& layout);

template <typename T>
std::unique_ptr<Mixer<T>> make_attention(const ModelConfig& config, const std::string& prefix,
                                         int threads, Layout& layout);
// The running mean of the projected tokens so far: the smallest causal mixer.
template <typename T>
std::unique_ptr<Mixer<T>> make_running_mean(const ModelConfig& config, const std::string& prefix,
                                            int threads, Layout& layout);

std::vector<std::string> mixer_names();

}  // namespace talea::train
