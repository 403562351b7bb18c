// What: writes the per-row and scalar outputs of host lanes.
// Why: what an ignored, poisoned or NaN row shows to the user is decided once.
// Never: touches dx, dw or db.
#include "ops/linear_cross_entropy/outputs.hpp"

#include <cmath>

#include "core/half.hpp"
#include "ops/linear_cross_entropy/late.hpp"

namespace talea::lce {

RowReport blank_row(RowKind kind) {
  RowReport row;
  if (kind == RowKind::poisoned) row.loss = row.lse = row.logp = row.entropy = NAN;
  return row;
}

void write_row(const Problem& p, const Outputs& out, int64_t t, const RowReport& row) {
  if (out.loss && p.options.reduction == Reduction::none) put(out.loss, t, row.loss);
  if (out.lse) put(out.lse, t, row.lse);
  if (out.target_logprob) put(out.target_logprob, t, row.logp);
  if (out.entropy) put(out.entropy, t, row.entropy);
  const bool ranked = row.best && !std::isnan(row.lse);
  if (out.argmax) put(out.argmax, t, ranked ? static_cast<double>(row.best[0].id) : -1.0);
  const double none = std::isnan(row.lse) ? NAN : 0.0;
  for (int64_t j = 0; j < p.top_k; ++j) {
    if (out.topk_values) put(out.topk_values, t, j, ranked ? row.best[j].value : none);
    if (out.topk_ids) put(out.topk_ids, t, j, ranked ? static_cast<double>(row.best[j].id) : -1.0);
    if (out.topk_logprobs)
      put(out.topk_logprobs, t, j, ranked ? row.best[j].value - row.lse : none);
  }
}

void write_scalars(const Problem& p, const Outputs& out, const TargetFacts& facts,
                   const Normaliser& m, double loss_sum, int64_t hits) {
  if (out.loss && p.options.reduction != Reduction::none)
    put(out.loss, 0, reduce_loss(p, m, loss_sum));
  if (out.accuracy)
    put(out.accuracy, 0, static_cast<double>(hits) / static_cast<double>(facts.valid));
}

int64_t kept_beside(const Problem& p) {
  if (!p.late_factor) return 0;
  int64_t bytes = p.rest_bytes;
  if (p.wants_dx_rest) bytes += p.tokens * dx_rest_columns(p.hidden);
  const int64_t rows = p.tokens / (p.sequence_parallel ? p.world : 1);
  if (p.wants_dx) bytes += rows * p.hidden * (size_of(p.dx_dtype) - size_of(p.hidden_dtype));
  if (p.wants_dw && !p.accumulate_dw)
    bytes += p.vocab_stored * p.hidden * (size_of(p.dw_dtype) - size_of(p.weight_dtype));
  return bytes;
}

}  // namespace talea::lce
