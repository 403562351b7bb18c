// What: two neighbouring elements as bf16 and what that rounding left.
// Why: every kernel that keeps a rest of dW agrees on its digits.
// Never: loses a digit that it keeps.
#pragma once
#include "ops/linear_cross_entropy/sm90/pack.cuh"
#include "ops/linear_cross_entropy/sm90/split.hpp"

namespace talea::lce::sm90 {

// One pair of neighbouring elements. The rest counts units of 2^-kBits of the last digit of the
// bf16 number, from half a digit below it, on its bits as an integer: the same rule on both sides
// of an exponent's end.
template <int kBits>
struct Pair {
  static constexpr int kShift = 16 - kBits;
  static constexpr uint32_t kHalf = 0x8000, kMask = ((1u << kBits) - 1) << kShift;

  // low, high: rests at kShift.
  static __device__ __forceinline__ float2 join(uint32_t both, uint32_t low, uint32_t high) {
    if constexpr (kBits == 0) return unpack<false>(both);
    return {__uint_as_float((both << 16) + low - kHalf),
            __uint_as_float((both & 0xffff0000u) + high - kHalf)};
  }
  // The bf16 pair; low, high: what it left of each, at kShift, with digits below that are no part.
  static __device__ __forceinline__ uint32_t part(float2 x, uint32_t& low, uint32_t& high) {
    const uint32_t both = pack<false>(x.x, x.y);
    low = left(x.x, both << 16);
    high = left(x.y, both & 0xffff0000u);
    return both;
  }
  // Element `at` of a lane's, from the words of its rest, at kShift.
  static __device__ __forceinline__ uint32_t digits(const uint32_t* rest, int at) {
    if constexpr (kBits == 0) {
      return 0;
    } else {
      const uint32_t word = rest[at * kBits / 32];
      const int place = at * kBits % 32;
      return (place < kShift ? word << (kShift - place) : word >> (place - kShift)) & kMask;
    }
  }
  // The same, into the word: rest as part() left it.
  static __device__ __forceinline__ uint32_t placed(uint32_t rest, int at) {
    const int place = at * kBits % 32;
    return place < kShift ? (rest & kMask) >> (kShift - place) : (rest & kMask) << (place - kShift);
  }

 private:
  static __device__ __forceinline__ uint32_t left(float x, uint32_t rounded) {
    if constexpr (kBits == 0) return 0;
    // From 0 to kHalf too much, where a tie was rounded down.
    return min(__float_as_uint(x) - rounded + kHalf + (1u << kShift) / 2, 0xffffu);
  }
};

}  // namespace talea::lce::sm90
