// What: the partial state (m, l, o) of one attention row, and the one way in which two merge.
// Why: segments of a long list, and keys cut over ranks, reduce by this algebra.
// Never: feels a sink: it joins where the whole row is known.
#pragma once

#include <cmath>
#include <cstdint>

#ifndef TALEA_HOST_DEVICE
#ifdef __CUDACC__
#define TALEA_HOST_DEVICE __host__ __device__
#else
#define TALEA_HOST_DEVICE
#endif
#endif

namespace talea {

// o is kept apart, not normalised: sum of exp(s_i - max) v_i. An empty part: max -Inf, sum 0, o 0.
template <typename T>
struct AttentionState {
  T max = -INFINITY;
  T sum = 0;
};

// What the sums of the two parts are multiplied by when they join.
template <typename T>
struct AttentionFactors {
  T a = 1, b = 1;
};

template <typename T>
TALEA_HOST_DEVICE inline AttentionFactors<T> factors(const AttentionState<T>& a,
                                                     const AttentionState<T>& b) {
  // A comparison with NaN is false: keep whichever side is NaN.
  const T max = (a.max >= b.max || a.max != a.max) ? a.max : b.max;
  // A part of -Inf weighs nothing even against -Inf.
  return {a.max == -INFINITY ? T(0) : std::exp(a.max - max),
          b.max == -INFINITY ? T(0) : std::exp(b.max - max)};
}

// Merges b into a, o of b into o of a: dim numbers each.
template <typename T>
TALEA_HOST_DEVICE inline void merge(AttentionState<T>& a, T* o, const AttentionState<T>& b,
                                    const T* other, int64_t dim) {
  const AttentionFactors<T> f = factors(a, b);
  for (int64_t c = 0; c < dim; ++c) o[c] = o[c] * f.a + other[c] * f.b;
  a.sum = a.sum * f.a + b.sum * f.b;
  a.max = (a.max >= b.max || a.max != a.max) ? a.max : b.max;
}

// The natural lse of a state: +Inf for a row without a key.
template <typename T>
TALEA_HOST_DEVICE inline T lse_of(const AttentionState<T>& s, bool empty) {
  return empty ? T(INFINITY) : s.max + std::log(s.sum);
}

}  // namespace talea
