// What: the logits product with bias, softcap, per-token scale and entropy, built for its modes.
// Why: each instantiation compiles on its own.
// Never: decides which mode runs.
#include "ops/linear_cross_entropy/sm90/logits_run.cuh"

namespace talea::lce::sm90 {

void general_logits_product(const LogitsCall& call, const Launch& launch) {
  switch (call.mode) {
    case LogitsMode::shift:
      return run_shape<LogitsMode::shift, true>(call, launch);
    case LogitsMode::store:
      return run_shape<LogitsMode::store, true>(call, launch);
    case LogitsMode::online:
      return run_shape<LogitsMode::online, true>(call, launch);
    default:  // it never runs ahead
      return run_logits<LogitsShape, LogitsMode::sums, true, false>(call, launch);
  }
}

}  // namespace talea::lce::sm90
