// What: writes the per-row and scalar outputs of host lanes.
// Why: what an ignored, poisoned or NaN row shows to the user is decided once.
// Never: touches dx, dw or db.
#pragma once

#include "algebra/top_k.hpp"
#include "ops/linear_cross_entropy/contract.hpp"

namespace talea::lce {

// Number of candidates a lane must keep per row.
inline int64_t candidates_kept(const Problem& p) {
  return std::max<int64_t>(p.top_k, p.wants_argmax || p.wants_accuracy ? 1 : 0);
}

// Everything the user sees of one row.
struct RowReport {
  double loss = 0, lse = 0, logp = 0, entropy = 0;
  const Candidate<double>* best = nullptr;  // candidates_kept(p) of them; null: none (ids -1)
};

// A row that was ignored (zeros) or poisoned (NaN).
RowReport blank_row(RowKind kind);

void write_row(const Problem& p, const Outputs& out, int64_t t, const RowReport& row);

// hits: valid rows whose best candidate is the target.
void write_scalars(const Problem& p, const Outputs& out, const TargetFacts& facts,
                   const Normaliser& m, double loss_sum, int64_t hits);

// Bytes that an fp32 gradient of a 16-bit input takes beyond the one returned in the end, while it
// waits for a late factor.
int64_t kept_beside(const Problem& p);

}  // namespace talea::lce
