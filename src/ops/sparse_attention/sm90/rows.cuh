// What: the online softmax of a tile of keys in the registers of a warpgroup, and a row's end.
// Why: every rule of sections 4 and 5 about a row stands here, on fp32 accumulators.
// Never: lets a row feel another one: what a row computes does not depend on the rows beside it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "device/sm90/ptx.cuh"

namespace talea::sparse_attention::sm90 {

inline constexpr float log2_e = 1.4426950408889634f;
// Weights are e^(s - reference). The reference of a tile is that of the sums so far, or where the
// weights would grow beyond 2^8 its own maximum: most tiles leave the sums as they are.
inline constexpr float most_above = 5.545177444f;
inline constexpr float most_raised = 0x1p60f;  // a sum is raised by no more than that

// What a thread knows of its two rows (r and r + 8 of its warp's 16). Sums are of its own columns.
struct RowPair {
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
  float top[2] = {-INFINITY, -INFINITY};  // the largest logit this warpgroup saw
};

__device__ inline float power(float x) { return talea::sm90::exp2_fast(x * log2_e); }

// Where all is -Inf yet, any finite number will do: e^(-Inf - 0) is 0.
__device__ inline float base_of(float reference) {
  return reference == -INFINITY ? 0.0f : reference;
}

// e^(from - to), 1 where they are equal: what a sum relative to `from` becomes relative to `to`.
__device__ inline float change_of(float from, float to) {
  return from == to ? 1.0f : power(from - base_of(to));
}

// Before weights relative to `other` are added to a sum relative to `own`: what the sum is
// multiplied by before and after, so that it ends relative to the later of both. Bounded: where the
// change is large, those weights are nothing.
struct Meeting {
  float before = 1, after = 1;
};
__device__ inline Meeting meeting_of(float own, float other) {
  if (own == other) return {};
  if (own < other) return {change_of(own, other), 1};
  const float raised = fminf(power(base_of(own) - other), most_raised);
  return {raised, 1.0f / raised};
}

template <bool kF16>
__device__ inline uint32_t packed(float low, float high) {
  uint32_t bits;
  if constexpr (kF16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// s: accumulators of q k^T, m64n64: s[4 n + e], e = 0, 1 of row r, 2, 3 of row r + 8; column
// 8 n + 2 (lane % 4) + e % 2. valid: bit w * 16 + l of a slot is that of produce.cuh.
__device__ inline void scale_and_mask(float (&s)[32], uint64_t valid, float scale) {
  if (valid == ~uint64_t{0}) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] *= scale;
    return;
  }
  const int quad = threadIdx.x % 4, shift = quad / 2 * 16 + quad % 2 * 2;
  const unsigned words[2] = {static_cast<unsigned>(valid) >> shift,
                             static_cast<unsigned>(valid >> 32) >> shift};
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool there = words[n % 2] >> (n / 2 * 4 + e % 2) & 1;
      s[4 * n + e] = there ? s[4 * n + e] * scale : -INFINITY;
    }
}

// The largest score of a tile in each of the two rows, the same in all lanes of a quad. NaN loses.
// kRows 1: row r + 8 is nobody's.
template <int kRows = 2>
__device__ inline void most_of(const float (&s)[32], float (&most)[2]) {
  float part[2][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      part[i][j] = fmaxf(fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]),
                         fmaxf(s[4 * j + 16 + 2 * i], s[4 * j + 17 + 2 * i]));
    most[i] = fmaxf(fmaxf(part[i][0], part[i][1]), fmaxf(part[i][2], part[i][3]));
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
    most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
  }
}

// What weights of a tile are relative to.
__device__ inline float reference_of(float so_far, float most) {
  return most > so_far + most_above ? most : so_far;
}

// p: the weights of s, relative to `reference`; part: their sums over this thread's columns.
template <bool kF16, int kRows = 2>
__device__ inline void weigh(float (&s)[32], const float (&reference)[2], float (&part)[2],
                             uint32_t (&p)[16]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float base = base_of(reference[i]);
    float of[4] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 2 * i; e < 2 * i + 2; ++e) {
        s[4 * n + e] = power(s[4 * n + e] - base);
        of[n % 4] += s[4 * n + e];
      }
    part[i] = (of[0] + of[1]) + (of[2] + of[3]);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i] = i % 2 < kRows ? packed<kF16>(s[2 * i], s[2 * i + 1]) : 0;
}

// p: the weights of s. reference: what they are relative to; factor: what earlier sums of the two
// rows become by that.
template <bool kF16>
__device__ inline void weights_of(float (&s)[32], RowPair& r, float (&factor)[2],
                                  uint32_t (&p)[16]) {
  float most[2], part[2];
  most_of(s, most);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    r.top[i] = fmaxf(r.top[i], most[i]);
    const float to = reference_of(r.reference[i], most[i]);
    factor[i] = change_of(r.reference[i], to);
    r.reference[i] = to;
  }
  weigh<kF16>(s, r.reference, part, p);
#pragma unroll
  for (int i = 0; i < 2; ++i) r.sum[i] = __fmaf_rn(r.sum[i], factor[i], part[i]);
}

template <int kCount>
__device__ inline void multiply_rows(float (&o)[kCount], const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

// What is written of a row. sum, top: of all its keys; any: whether a slot was valid.
struct RowEnd {
  float factor = 0, lse = INFINITY, top = -INFINITY;  // factor 0: o is 0 whatever it was
};

__device__ inline RowEnd end_of(float sum, float reference, float top, bool any, float sink) {
  if (!any) return {};
  if (isnan(sum)) return {NAN, NAN, top == INFINITY ? top : NAN};
  if (reference == -INFINITY) {  // all valid logits are -Inf
    if (sink > -INFINITY) return {0, -INFINITY, top};
    return {NAN, NAN, top};
  }
  const float lse = reference + logf(sum);
  if (isnan(sink)) return {NAN, lse, top};
  if (sink == -INFINITY) return {1.0f / sum, lse, top};
  const float more = expf(sink - reference);  // beside a sink that overflows nothing is left
  return {isinf(more) ? 0.0f : 1.0f / (sum + more), lse, top};
}

}  // namespace talea::sparse_attention::sm90
