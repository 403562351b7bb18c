// What: cosine and sine of a turn.
// Why: a turn is an integer, whose octant costs no rounding. Rows that are rounded to 16 bits, and
//      their gradients on the way back, need no more digits than the special function unit has.
// Never: sums turns.
#pragma once

#include "ops/mamba3/sm90/rows.cuh"

namespace talea::mamba3::sm90 {

// Of a turn in units of 2^-64: the octant by integers, the rest by polynomials of an angle of at
// most pi / 4, right to about one unit of fp32.
__device__ __forceinline__ void turn_sine_cosine(uint64_t turn, float& sine, float& cosine) {
  const auto high = static_cast<uint32_t>(turn >> 32);
  const uint32_t quadrant = (high + (1u << 29)) >> 30;
  const float x =
      static_cast<float>(static_cast<int32_t>(high - (quadrant << 30))) * 1.4629180792671596e-9f;
  const float y = x * x;
  float s = fmaf(y, 2.7557319e-6f, -1.9841270e-4f), c = fmaf(y, -2.7557319e-7f, 2.4801587e-5f);
  s = fmaf(s, y, 8.3333333e-3f), c = fmaf(c, y, -1.3888889e-3f);
  s = fmaf(s, y, -1.6666667e-1f), c = fmaf(c, y, 4.1666667e-2f);
  c = fmaf(c, y, -0.5f);
  s = fmaf(s * y, x, x), c = fmaf(c, y, 1.0f);
  const bool swaps = quadrant & 1;
  sine = __uint_as_float(__float_as_uint(swaps ? c : s) ^ (quadrant & 2) << 30);
  cosine = __uint_as_float(__float_as_uint(swaps ? s : c) ^ ((quadrant + 1) & 2) << 30);
}

// Of rows that are rounded to bf16, and of gradients that are turned back: off by at most 2^-20 of
// the length of a pair, of which that rounding leaves 2^-9. The angle is off by at most 2^-21.6, by
// NVIDIA's bounds the unit by 2^-21.1. Near 0 a sine has no more digits than that leaves it.
__device__ __forceinline__ void turn_sine_cosine_fast(uint64_t turn, float& sine, float& cosine) {
  const float x = static_cast<float>(static_cast<int32_t>(turn >> 32)) * 1.4629180792671596e-9f;
  sine = __sinf(x), cosine = __cosf(x);
}

// The same of a sum whose taint is 0, or no number: then there are none.
__device__ __forceinline__ void tainted_sine_cosine(uint64_t turn, float taint, float& sine,
                                                    float& cosine) {
  const float x =
      fmaf(static_cast<float>(static_cast<int32_t>(turn >> 32)), 1.4629180792671596e-9f, taint);
  sine = __sinf(x), cosine = __cosf(x);
}

// A sum that is a number is not the mark of one that is none.
__device__ __forceinline__ uint64_t marked(uint64_t sum, bool lost) {
  return lost ? cuda::no_turn : sum == cuda::no_turn ? cuda::no_turn + 1 : sum;
}

}  // namespace talea::mamba3::sm90
