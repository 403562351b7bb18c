// What: the end of the model as the trainer sees it: projection and loss of one micro-step.
// Why: the operator's lanes and the historical wrong ways stand side by side behind one call.
// Never: knows the rest of the model or the optimizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "train/batch.hpp"
#include "train/config.hpp"

namespace talea::train {

// What the accumulation rule wants of this micro-step.
struct LossShare {
  double upstream = 1;         // gradient of the window's loss by this micro-step's loss
  double denominator = 0;      // > 0: divide the sum by this; 0: by the valid rows of the call
  bool empty_is_zero = false;  // mean over no rows: 0 instead of NaN
};

template <typename T>
struct HeadCall {
  int64_t tokens, hidden, vocab;
  const T* x;  // [tokens, hidden]
  const T* w;  // [vocab, hidden]
  const Batch* batch;
  LossShare share;
  T* dx;  // [tokens, hidden], overwritten; null: forward only
  T* dw;  // [vocab, hidden], added to
};

template <typename T>
struct HeadResult {
  double loss = 0;
  std::vector<T> lse, logp;  // [tokens]; logp is empty with soft targets
  std::vector<T> hidden;     // what the head was given: the logits of a step come from it
};

template <typename T>
class Loss {
 public:
  virtual ~Loss() = default;
  virtual HeadResult<T> run(const HeadCall<T>& call) = 0;
  virtual std::string lane() const = 0;  // what ran, e.g. "cpu"
};

// A lane's name or "auto": talea::linear_cross_entropy. A mutant's name: variants.hpp.
template <typename T>
std::unique_ptr<Loss<T>> make_loss(const std::string& name, const TrainConfig& config, int threads);

}  // namespace talea::train
