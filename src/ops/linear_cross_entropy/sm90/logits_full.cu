// What: the logits product that also leaves sums and maxima per tile, built for its modes.
// Why: each instantiation compiles on its own.
// Never: decides which mode runs.
#include "ops/linear_cross_entropy/sm90/logits_run.cuh"

namespace talea::lce::sm90 {

void full_logits_product(const LogitsCall& call, const Launch& launch) {
  if (call.mode == LogitsMode::store)
    run_logits<LogitsShape, LogitsMode::store, true, true>(call, launch);
  else
    run_logits<LogitsShape, LogitsMode::sums, true, true>(call, launch);
}

}  // namespace talea::lce::sm90
