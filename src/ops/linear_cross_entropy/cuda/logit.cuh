// What: from an fp32 product to the logit of section 2 of the contract: scale, bias, softcap.
// Why: the pass that reduces a row and the pass that forms its gradient see the same number.
// Never: stores it.
#pragma once

#include "ops/linear_cross_entropy/cuda/chunk.hpp"

namespace talea::lce::cuda {

__device__ inline float row_scale(const Shape& s, int64_t t) {
  return static_cast<float>(s.token_scale ? s.logit_scale * s.token_scale.load(t) : s.logit_scale);
}

// The logit before the softcap.
__device__ inline float scaled_logit(const Shape& s, float product, float scale, int64_t column) {
  const float a = product * scale;
  return s.bias ? a + s.bias[column] : a;
}

__device__ inline float capped(const Shape& s, float a) {
  return s.softcap > 0 ? s.softcap * tanhf(a / s.softcap) : a;
}

// dz / da = 1 - tanh^2, from exp(-2 |a / k|): near the cap the subtraction would leave no digits.
__device__ inline float cap_slope(const Shape& s, float a) {
  const float e = expf(-2.0f * fabsf(a / s.softcap));
  if (e < 0x1p-62f) return 0.0f;  // a saturated logit has no gradient, not one of 1e-26
  return 4.0f * e / ((1.0f + e) * (1.0f + e));
}

__device__ inline float logit_of(const Shape& s, float product, float scale, int64_t column) {
  return capped(s, scaled_logit(s, product, scale, column));
}

// Row r of the chunk, if it is one.
__device__ inline bool is_row(const ChunkRows& c, int64_t r) {
  return r < c.rows && c.begin + r < c.totals->valid;
}

// The target's column among the local ones, or -1.
__device__ inline int64_t target_column(const Shape& s, int64_t t) {
  if (!s.has_targets) return -1;
  const int64_t column = s.targets.load_index(t) - s.vocab_begin;
  return column >= 0 && column < s.vocab_local ? column : -1;
}

}  // namespace talea::lce::cuda
