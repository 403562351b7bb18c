// What: the logits product without bias, softcap and entropy, built for its modes.
// Why: each instantiation compiles on its own.
// Never: decides which mode runs, except by the option it was built for.
#include "ops/linear_cross_entropy/sm90/logits_run.cuh"

namespace talea::lce::sm90 {

void logits_product(const LogitsCall& call, const Launch& launch) {
  if (call.full) return full_logits_product(call, launch);
  if (call.general) return general_logits_product(call, launch);
  switch (call.mode) {
    case LogitsMode::shift:
      return run_shape<LogitsMode::shift, false>(call, launch);
    case LogitsMode::store:
      return run_shape<LogitsMode::store, false>(call, launch);
    case LogitsMode::ahead:
      return run_logits<LogitsShape, LogitsMode::ahead, false, false>(call, launch);
    case LogitsMode::sums:
      return run_logits<LogitsShape, LogitsMode::sums, false, false>(call, launch);
    case LogitsMode::online:
      return run_shape<LogitsMode::online, false>(call, launch);
  }
}

}  // namespace talea::lce::sm90
