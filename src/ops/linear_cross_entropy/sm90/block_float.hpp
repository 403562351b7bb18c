// What: 64 numbers of a row of dW or dX in 16 bits each, under one exponent for all of them.
// Why: between chunks bf16 would lose digits of each sum, for an exponent that neighbours share.
// Never: loses Inf or NaN: a block that holds one is kept as bf16.
//
//   exponent e (a byte, biased as that of fp32): the largest magnitude lies below 2^(e - 126)
//   code u: x = (u - 2^15) 2^(e - 141); error: at most 2^-16 of 2^(e - 126)
//   e = 255: the codes are bf16
//   By fp32 alone: 2^23 + u, which an addition forms and rounds, has the code in its lower half.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __CUDACC__
#include "core/kernel_mutant.hpp"
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#endif

namespace talea::lce::sm90 {

#ifdef __CUDACC__
#define TALEA_BOTH __host__ __device__ __forceinline__
#else
#define TALEA_BOTH inline
#endif

struct BlockFloat {
  static constexpr int kElements = 64;
  static constexpr uint32_t kBf16 = 255;
  static constexpr int64_t blocks(int64_t columns) { return (columns + kElements - 1) / kElements; }
  static constexpr uint32_t kLeast = 15;      // so that 2^(e - 141) is a normal number
  static constexpr float kZero = 0x1.01p23f;  // the code of 0

  static TALEA_BOTH uint32_t bits(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
  }
  static TALEA_BOTH float number(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
  }

  // Of a block by its largest magnitude, NaN where one is; a step more where that would be rounded
  // out of it.
  static TALEA_BOTH uint32_t exponent(float largest) {
    const uint32_t e = bits(largest * (1 + 0x1p-12f)) >> 23 & 0xffu;
    return e < kLeast ? kLeast : e >= 254 ? kBf16 : e;
  }

  static TALEA_BOTH float unit(uint32_t exponent) { return number((exponent - 14) << 23); }
  static TALEA_BOTH float scale(uint32_t exponent) { return number((268 - exponent) << 23); }
  // code: in the lower half. Not of a block of bf16.
  static TALEA_BOTH float steps(uint32_t code) {
    return number(0x4b000000u | (code & 0xffffu)) - kZero;
  }
  static TALEA_BOTH float value(uint32_t code, uint32_t exponent) {
    return exponent == kBf16 ? number(code << 16) : steps(code) * unit(exponent);
  }
  // With 2^23's digits above it.
  static TALEA_BOTH uint32_t code(float x, uint32_t exponent) {
    return bits(fmaf(x, scale(exponent), kZero));
  }
#ifdef __CUDACC__
  // Two codes in a word.
  static __device__ __forceinline__ float2 values(uint32_t both, uint32_t exponent) {
    return {value(both & 0xffffu, exponent), value(both >> 16, exponent)};
  }
  static __device__ __forceinline__ uint32_t pair(float2 x, uint32_t exponent) {
    return exponent == kBf16 ? pack<false>(x.x, x.y)
                             : __byte_perm(code(x.x, exponent), code(x.y, exponent), 0x5410);
  }
#endif
};

#ifdef __CUDACC__
__device__ __forceinline__ float larger(float most, float x) {  // of magnitudes; NaN, if one is
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(most), "f"(fabsf(x)));
  return most;
}
__device__ __forceinline__ float largest_of_quad(float most) {  // four lanes have a row's block
  if (mutant(KernelMutant::exponent_of_a_lane)) return most;
  most = larger(most, __shfl_xor_sync(~0u, most, 1));
  return larger(most, __shfl_xor_sync(~0u, most, 2));
}
__device__ __forceinline__ float largest_of_warp(float most) {
  for (int other = 16; other > 0; other /= 2)
    most = larger(most, __shfl_xor_sync(~0u, most, other));
  return most;
}
#endif

}  // namespace talea::lce::sm90
#undef TALEA_BOTH
