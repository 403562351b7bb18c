// What: 64 sums of a row of dW in 16 bits each, under one exponent for all of them.
// Why: between chunks bf16 would lose 5 digits of each sum, for no digit of the exponent it needs.
// Never: loses Inf or NaN: a block that holds one is kept as bf16.
//
//   exponent e (a byte, biased as that of fp32): the largest magnitude lies below 2^(e - 126)
//   code: sign, 2 bits of an exponent below e, 13 of the fraction; lowest exponent: a fixed point
//   error: 2^-14 of an element within an eighth of the block's largest, 2^-17 of that beyond
//   e = 255: the codes are bf16
#pragma once
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
  static constexpr uint32_t kSign = 0x80000000u;
  static constexpr int kShift = 6;  // from where fp32 has its exponent's last two bits
  static constexpr float kDown = 0x1p-124f, kUp = 0x1p124f;  // the code's largest exponent is 3

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
  // up to the next power of two.
  static TALEA_BOTH uint32_t exponent(float largest) {
    const uint32_t e = bits(largest * (1 + 0x1p-12f)) >> 23 & 0xffu;
    return e >= 254 ? kBf16 : e == 0 ? 1 : e;
  }

  // A row's block being read: no branch tells bf16 from codes.
  struct Reader {
    uint32_t mask;
    int shift;
    float up, scale;
    explicit TALEA_BOTH Reader(uint32_t exponent) {
      const bool bf16 = exponent == kBf16;
      mask = bf16 ? 0xffff0000u : 0x81fffc00u;
      shift = bf16 ? 0 : kShift;
      up = bf16 ? 1.f : kUp;
      scale = bf16 ? 1.f : number(exponent << 23);
    }
    // code: in the upper half of the word, whatever the lower holds.
    TALEA_BOTH float value(uint32_t code) const {
      const auto spread = static_cast<uint32_t>(static_cast<int32_t>(code) >> shift);
      return number(spread & mask) * up * scale;
    }
    TALEA_BOTH float lower(uint32_t both) const { return value(both << 16); }
    TALEA_BOTH float upper(uint32_t both) const { return value(both); }
  };

  struct Writer {
    bool bf16;
    float scale;
    explicit TALEA_BOTH Writer(uint32_t exponent)
        : bf16(exponent == kBf16), scale(number((254 - exponent) << 23)) {}
    // In the upper half, with digits below it that are no part.
    TALEA_BOTH uint32_t code(float x) const {
      const uint32_t b = bits(x * scale * kDown);
      return (((b << kShift) + 0x8000u) & ~kSign) | (b & kSign);
    }
#ifdef __CUDACC__
    __device__ __forceinline__ uint32_t pair(float lower, float upper) const {
      const uint32_t codes = __byte_perm(code(lower), code(upper), 0x7632);
      return bf16 ? pack<false>(lower, upper) : codes;
    }
#endif
  };
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
