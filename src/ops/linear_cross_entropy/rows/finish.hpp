// What: from a complete row state to the row's loss and the coefficients of its gradient.
// Why: section 2 of the contract stands in one place for every lane, host and device.
// Never: reads a logit; everything about the row is in its state.
#pragma once

#include "algebra/row_state.hpp"
#include "core/mutant.hpp"

namespace talea::lce {

// What every row shares.
template <typename T>
struct LossTerms {
  T label_smoothing = 0;
  T z_loss = 0;
  T vocab = 1;             // V
  T class_weight_sum = 1;  // sum_v c_v (V without class weights)
  T inverse_denominator = 1;
};

// What belongs to one row. upstream already holds 1 where the caller gave none.
template <typename T>
struct RowTerms {
  T class_weight = 1;  // c_y; unused with soft targets
  T token_weight = 1;
  T upstream = 1;
  T upstream_lse = 0;
  T upstream_entropy = 0;
  bool soft = false;
};

// dz_v = prob * p_v - smooth * c_v - soft * c_v q_v - entropy_up * p_v (logp_v + entropy)
// and, for v = y, `target` replaces prob * p_y - (1 - eps) c_y G and nothing else:
// dz_y = target - smooth * c_y - entropy_up * p_y (logp_y + entropy).
template <typename T>
struct RowResult {
  T loss;  // l_t, before the reduction
  T prob;
  T target;
  T smooth;
  T soft;
  T entropy_up;
};

template <typename T>
TALEA_HOST_DEVICE inline RowResult<T> finish_row(const RowState<T>& state, const RowSummary<T>& row,
                                                 const LossTerms<T>& all, const RowTerms<T>& own) {
  const T eps = all.label_smoothing, lse = row.lse;
  const T zeta = all.z_loss * (mutant(Mutant::class_weight_on_zloss) ? own.class_weight : T(1));
  RowResult<T> r;
  T hard_or_soft, mass;  // the (1 - eps) part of ce_t, and its sum of c q
  if (own.soft) {
    mass = state.soft_mass;
    hard_or_soft = mass * lse - state.soft_sum;
  } else {
    mass = own.class_weight;
    // 0 * inf would be NaN where PyTorch has it too (class weight 0, log-probability -inf).
    hard_or_soft = mass * -row.logp_target;
    if (mutant(Mutant::b22_probability_clamp))
      hard_or_soft = mass * -std::log(row.target_share + T(1e-8));
  }
  const T smooth_part =
      eps > T(0) ? (eps / all.vocab) * (all.class_weight_sum * lse - state.class_sum) : T(0);
  // One entry has probability 1, whatever the target says: only z-loss and lse have a slope.
  // Exactly, not by terms that cancel; 0 * lse keeps the NaN of a row without a distribution.
  const bool certain = all.vocab == T(1);
  const T cross_entropy = certain ? T(0) * lse : (T(1) - eps) * hard_or_soft + smooth_part;
  r.loss = own.token_weight * (cross_entropy + zeta * lse * lse);
  const T g = own.upstream * own.token_weight * all.inverse_denominator;
  const T slope = mutant(Mutant::zloss_outside_gradient) ? T(0) : T(2) * zeta * lse;
  const T spread = eps / all.vocab * all.class_weight_sum + slope;
  T others_share = row.others_share;
  if (mutant(Mutant::b5_subtract_one))  // as if p had been stored in 16 bits
    others_share = T(1) - std::round(row.target_share * T(256)) / T(256);
  r.prob = g * ((T(1) - eps) * mass + spread) + own.upstream_lse;
  r.target = own.soft ? T(0)
                      : (g * spread + own.upstream_lse) * row.target_share -
                            g * (T(1) - eps) * mass * others_share;
  r.smooth = g * eps / all.vocab;
  r.soft = own.soft ? g * (T(1) - eps) : T(0);
  r.entropy_up = own.upstream_entropy;
  if (certain) {
    r.prob = r.target = g * slope + own.upstream_lse;
    r.smooth = r.soft = r.entropy_up = T(0);
  }
  return r;
}

}  // namespace talea::lce
