// What: from an fp32 product to the logit of section 2 of the contract: scale, bias, softcap.
// Why: the pass that reduces a row and the pass that forms its gradient see the same number.
// Never: stores it.
#pragma once

#include "ops/linear_cross_entropy/cuda/chunk.hpp"
#include "ops/linear_cross_entropy/rows/tokens.cuh"

namespace talea::lce::cuda {

__device__ inline float row_scale(const Shape& s, int64_t t) {
  return static_cast<float>(s.rule.token_scale ? s.logit_scale * s.rule.token_scale.load(t)
                                               : s.logit_scale);
}

// The logit before the softcap; bias 0 where there is none. Written out, so that every pass rounds
// it alike.
__device__ __forceinline__ float scaled_logit(float product, float scale, float bias) {
  const float logit = __fmaf_rn(product, scale, bias);
  return mutant(Mutant::logits_rounded) ? __bfloat162float(__float2bfloat16(logit)) : logit;
}

// Four neighbours of a per-column vector of the workspace, whose columns are padded.
__device__ __forceinline__ float4 four_of(const float* columns, int64_t first, float absent) {
  if (!columns) return {absent, absent, absent, absent};
  return *reinterpret_cast<const float4*>(columns + first);
}

__device__ __forceinline__ float bias_of(const Shape& s, int64_t column) {
  return s.bias ? s.bias[column] : 0.0f;
}

// exp in the precision that the problem's dtype asks for.
template <bool Fast>
__device__ __forceinline__ float exp_of(float x) {
  if (!Fast) return expf(x);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
}

// The capped logit k tanh(a / k) and its slope 1 - tanh^2, both from e = exp(2 a / k): near the cap
// the subtraction would leave no digits. In 16-bit problems k - 2k / (1 + e) is right to 2^-23 of a
// cap up to 256; elsewhere the library's tanh keeps the digits of small logits.
struct Cap {
  float logit, slope;
};
__device__ __forceinline__ Cap cap_of(const Shape& s, float a) {
  Cap cap;
  if (s.fast_cap) {
    const float y = a * s.cap_exponent;
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(y));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    cap.logit = __fmaf_rn(-2.0f * s.softcap, r, s.softcap);
    // A saturated logit has no gradient, not one of 1e-26; nor one of infinity times 0.
    cap.slope = fabsf(y) < 62.0f ? e * r * (4.0f * r) : 0.0f;
  } else {
    const float e = expf(-2.0f * fabsf(a / s.softcap));
    cap.logit = __fmul_rn(s.softcap, tanhf(a / s.softcap));
    cap.slope = e < 0x1p-62f ? 0.0f : 4.0f * e / ((1.0f + e) * (1.0f + e));
  }
  if (mutant(Mutant::softcap_no_derivative)) cap.slope = 1;
  return cap;
}

__device__ __forceinline__ float capped(const Shape& s, float a) {
  return s.softcap > 0 ? cap_of(s, a).logit : a;
}

__device__ __forceinline__ float logit_of(const Shape& s, float product, float scale,
                                          int64_t column) {
  return capped(s, scaled_logit(product, scale, bias_of(s, column)));
}

// Row r of the chunk, if it is one.
__device__ inline bool is_row(const ChunkRows& c, int64_t r) {
  return r < c.rows && c.begin + r < c.facts->valid;
}

}  // namespace talea::lce::cuda
