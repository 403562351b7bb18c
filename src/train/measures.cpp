// What: logits of a step and the distances of two runs.
// Why: candidate, reference and every twin are measured by the same lines.
// Never: changes a run other than by its own step.
#include "train/measures.hpp"

#include <cmath>

#include "core/fail.hpp"
#include "train/optimizer.hpp"
#include "train/product.hpp"

namespace talea::train {

namespace {

// The largest relative L2 of one tensor's gradients, and whose.
template <typename T>
double worst_tensor(const Trainer<T>& run, const Trainer<double>& probe, std::string* name) {
  double worst = 0;
  for (const Slice& slice : run.layout().slices()) {
    const double e = relative_l2(run.state().grads.data() + slice.offset,
                                 probe.state().grads.data() + slice.offset, slice.size());
    if (name && !(e <= worst) && !std::isnan(worst)) *name = slice.name;
    widen(worst, e);
  }
  return worst;
}

}  // namespace

void widen(double& band, double value) {
  if (!std::isnan(band) && !(value <= band)) band = value;
}

void widen(Drift& band, const Drift& drift) {
  for (const auto& [name, field] : drift_fields) widen(band.*field, drift.*field);
}

template <typename T>
std::vector<T> logits_of(const Trainer<T>& run, const std::vector<HeadResult<T>>& heads,
                         const TrainConfig& config) {
  std::vector<T> hidden;
  for (const HeadResult<T>& h : heads)
    hidden.insert(hidden.end(), h.hidden.begin(), h.hidden.end());
  const std::string name = config.model.tied ? "embedding" : "head";
  for (const Slice& s : run.layout().slices()) {
    if (s.name != name) continue;
    const int64_t rows = static_cast<int64_t>(hidden.size()) / s.columns;
    std::vector<T> logits(static_cast<size_t>(rows * s.rows));
    product_nt(logits.data(), hidden.data(), run.state().params.data() + s.offset,
               {rows, s.rows, s.columns}, false, 1);
    return logits;
  }
  fail(ErrorKind::runtime, "model: no tensor {}", name);
}

template <typename T>
OpenStep<T> open_step(Trainer<T>& run, const std::vector<Batch>& batches, const Window& window) {
  OpenStep<T> open;
  for (const Batch& b : batches) open.heads.push_back(run.micro(b, window));
  return open;
}

template <typename T>
Taken<T> take_step(Trainer<T>& run, const std::vector<Batch>& batches, const Window& window,
                   const TrainConfig& config) {
  const OpenStep<T> open = open_step(run, batches, window);
  std::vector<T> logits = logits_of(run, open.heads, config);
  return {run.update(), std::move(logits)};
}

template <typename T>
void before_clipping(SameState& s, const Trainer<T>& run, const OpenStep<T>& mine,
                     const Trainer<double>& probe, const OpenStep<double>& truth) {
  for (size_t i = 0; i < truth.heads.size(); ++i) {
    widen(s.lse, relative_max(mine.heads[i].lse, truth.heads[i].lse, 1.0));
    widen(s.logp, relative_max(mine.heads[i].logp, truth.heads[i].logp, 1.0));
  }
  s.logits = relative_max(mine.logits, truth.logits, 1.0);
  s.grads = worst_tensor(run, probe, &s.worst_tensor);
}

template <typename T>
void after_update(SameState& s, const Trainer<T>& run, const StepReport& mine,
                  const Trainer<double>& probe, const StepReport& truth) {
  s.loss = std::fabs(mine.loss - truth.loss) / std::max(1.0, std::fabs(truth.loss));
  s.norm = relative(mine.grad_norm, truth.grad_norm);
  s.clip = relative(mine.clip, truth.clip);
  s.clipped = worst_tensor(run, probe, nullptr);
  s.clipped_norm = relative(gradient_norm(run.state().grads), gradient_norm(probe.state().grads));
  s.params = relative_l2(run.state().params, probe.state().params);
  s.m = relative_l2(run.state().m, probe.state().m);
  s.v = relative_l2(run.state().v, probe.state().v);
}

template <typename T>
Drift drift_before(const Trainer<T>& run, const Trainer<double>& reference) {
  Drift d;
  d.params_before = relative_l2(run.state().params, reference.state().params);
  d.m_before = relative_l2(run.state().m, reference.state().m);
  d.v_before = relative_l2(run.state().v, reference.state().v);
  return d;
}

template <typename T>
Drift drift_after(Drift d, const Trainer<T>& run, const Taken<T>& mine,
                  const Trainer<double>& reference, const Taken<double>& theirs) {
  d.loss = std::fabs(mine.report.loss - theirs.report.loss);
  d.logits = relative_max(mine.logits, theirs.logits, 1.0);
  d.norm = relative(mine.report.grad_norm, theirs.report.grad_norm);
  d.clip = relative(mine.report.clip, theirs.report.clip);
  d.grads = relative_l2(run.state().grads, reference.state().grads);
  d.params = relative_l2(run.state().params, reference.state().params);
  d.m = relative_l2(run.state().m, reference.state().m);
  d.v = relative_l2(run.state().v, reference.state().v);
  return d;
}

#define TALEA_INSTANTIATE(T)                                                                    \
  template std::vector<T> logits_of(const Trainer<T>&, const std::vector<HeadResult<T>>&,       \
                                    const TrainConfig&);                                        \
  template OpenStep<T> open_step(Trainer<T>&, const std::vector<Batch>&, const Window&);        \
  template Taken<T> take_step(Trainer<T>&, const std::vector<Batch>&, const Window&,            \
                              const TrainConfig&);                                              \
  template void before_clipping(SameState&, const Trainer<T>&, const OpenStep<T>&,              \
                                const Trainer<double>&, const OpenStep<double>&);               \
  template void after_update(SameState&, const Trainer<T>&, const StepReport&,                  \
                             const Trainer<double>&, const StepReport&);                        \
  template Drift drift_before(const Trainer<T>&, const Trainer<double>&);                       \
  template Drift drift_after(Drift, const Trainer<T>&, const Taken<T>&, const Trainer<double>&, \
                             const Taken<double>&);
TALEA_INSTANTIATE(float)
TALEA_INSTANTIATE(double)

}  // namespace talea::train
