// What: the logits product in fp16, built for its modes.
// Why: each instantiation compiles on its own.
// Never: decides which mode runs.
#include "ops/linear_cross_entropy/sm90/logits_half.cuh"
#include "ops/linear_cross_entropy/sm90/logits_run.cuh"

namespace talea::lce::sm90 {

void half_logits_product(const LogitsCall& call, const Launch& launch) {
  using Few = Shape<64, kLogitsTile, 6, true, Major::k, Major::k, true>;
  using Many = Shape<128, kLogitsTile, 5, true, Major::k, Major::k, true>;
  if (call.mode == LogitsMode::shift)
    run_logits<Few, LogitsEpilogue<LogitsMode::shift, false, false>>(call, launch);
  else if (call.mode == LogitsMode::store)
    run_logits<Many, HalfLogitsEpilogue>(call, launch);
  else
    run_logits<Many, LogitsEpilogue<LogitsMode::sums, false, false>>(call, launch);
}

}  // namespace talea::lce::sm90
