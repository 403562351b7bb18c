// The logits product with bias, softcap, per-token scale and entropy, built for its modes.
// Exists so that each instantiation compiles on its own.
// Never decides which mode runs.
#include "ops/linear_cross_entropy/sm90/logits_run.cuh"

namespace talea::lce::sm90 {

void general_logits_product(const LogitsCall& call, const Launch& launch) {
  if (call.kind == LogitsCall::Kind::shift) return run_shape<LogitsMode::shift, true>(call, launch);
  if (call.kind == LogitsCall::Kind::store) return run_shape<LogitsMode::store, true>(call, launch);
  if (call.kind == LogitsCall::Kind::online)
    return run_shape<LogitsMode::online, true>(call, launch);
  run_logits<LogitsShape, LogitsMode::sums, true, false>(call, launch);
}

}  // namespace talea::lce::sm90
