// What: the partial softmax state of one row, and the one way in which two partial states merge.
// Why: lanes of a warp, vocabulary tiles, chunks and ranks all reduce by this algebra.
// Never: forms p_target - 1 by subtraction; the target's own term is kept apart from the sum.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define TALEA_HOST_DEVICE __host__ __device__
#else
#define TALEA_HOST_DEVICE
#endif

namespace talea {

// T is the accumulator: double in the reference, float or double in the products.
template <typename T>
struct RowState {
  T max = -INFINITY;     // over every logit seen, the target's included
  T others = 0;          // sum over v != target of exp(z_v - max)
  T target = -INFINITY;  // logit of the target, where has_target
  T shifted = 0;         // sum over v != target of exp(z_v - max) * (z_v - max): for the entropy
  T class_sum = 0;       // sum of class_weight_v * z_v: for label smoothing
  T soft_sum = 0;        // sum of class_weight_v * q'_v * z_v: for soft targets
  T soft_mass = 0;       // sum of class_weight_v * q'_v
  T has_target = 0;      // 1 where the target's column was in this part
};

// exp(part - whole) of two maxima, where an empty part (-inf) weighs nothing even against -inf.
template <typename T>
TALEA_HOST_DEVICE inline T rescale(T part_max, T whole_max) {
  return part_max == -INFINITY ? T(0) : std::exp(part_max - whole_max);
}

template <typename T>
TALEA_HOST_DEVICE inline RowState<T> merge(const RowState<T>& a, const RowState<T>& b) {
  RowState<T> r;
  // A comparison with NaN is false: keep whichever side is NaN.
  r.max = (a.max >= b.max || a.max != a.max) ? a.max : b.max;
  const T fa = rescale(a.max, r.max), fb = rescale(b.max, r.max);
  r.others = a.others * fa + b.others * fb;
  // exp(z - r.max) * (z - r.max) = f * exp(z - a.max) * ((z - a.max) + (a.max - r.max))
  const T da = fa > T(0) ? a.max - r.max : T(0), db = fb > T(0) ? b.max - r.max : T(0);
  r.shifted = fa * (a.shifted + a.others * da) + fb * (b.shifted + b.others * db);
  r.target = a.has_target != T(0) ? a.target : b.target;
  r.has_target = a.has_target + b.has_target;
  r.class_sum = a.class_sum + b.class_sum;
  r.soft_sum = a.soft_sum + b.soft_sum;
  r.soft_mass = a.soft_mass + b.soft_mass;
  return r;
}

// What a complete state says about its row.
template <typename T>
struct RowSummary {
  T lse;
  T logp_target;   // log-probability of the target; only with has_target
  T others_share;  // 1 - p_target = S' / S, never formed by subtraction
  T target_share;  // p_target
  T entropy;
  T sum;            // S: p_v = exp(z_v - max) / sum
  T mean_distance;  // sum of p_v (z_v - max): z_v - max less this is log p_v + entropy, of which
                    // lse would take the digits of a confident row
};

template <typename T>
TALEA_HOST_DEVICE inline RowSummary<T> summarise(const RowState<T>& s) {
  RowSummary<T> r;
  if (s.max == -INFINITY) {  // every logit is -inf: no distribution
    const T nan = static_cast<T>(NAN);
    return {nan, nan, nan, nan, nan, nan, nan};
  }
  const bool has = s.has_target != T(0);
  const T distance = has ? s.target - s.max : T(0);  // <= 0
  const T own = has ? std::exp(distance) : T(0);
  r.sum = s.others + own;
  // log S: where the target is the maximum, own is 1 and log1p keeps the digits of S'.
  const T log_sum = (has && distance == T(0)) ? std::log1p(s.others) : std::log(r.sum);
  r.lse = s.max + log_sum;
  r.others_share = has ? s.others / r.sum : T(1);
  r.target_share = own / r.sum;
  const T odds = has && own > T(0) ? s.others / own : static_cast<T>(INFINITY);
  r.logp_target = odds < T(1) ? -std::log1p(odds) : distance - log_sum;
  const T own_shifted = own > T(0) ? own * distance : T(0);
  r.mean_distance = (s.shifted + own_shifted) / r.sum;
  r.entropy = log_sum - r.mean_distance;
  return r;
}

}  // namespace talea
