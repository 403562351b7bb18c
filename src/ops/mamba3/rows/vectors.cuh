// What: four neighbours of a row at a time, of any dtype and stride, and sums over a warp's lanes.
// Why: a thread that moves four elements at once asks for a quarter as many addresses.
// Never: reads beyond a row's end.
#pragma once

#include <initializer_list>

#ifdef __CUDACC__
#include "device/common/reduce.cuh"
#endif
#include "ops/mamba3/rows/numbers.hpp"

namespace talea::mamba3::cuda::one_step {

constexpr int vector = 4;

// Four neighbours of a row as they lie in memory: a word each, or two of 16 bits a word.
struct Four {
  uint32_t bits[vector];
};

// Columns [c, c + 4) of the row at `at`; zeros from `end` on. whole: they are one load.
template <bool whole>
__device__ __forceinline__ Four four_at(const View& v, int64_t at, int64_t stride, int c, int end) {
  Four x = {};
  if (!v.data || c >= end) return x;
  if constexpr (whole) {
    if (v.dtype == DType::f32) {
      const uint4 y = *reinterpret_cast<const uint4*>(static_cast<const float*>(v.data) + at + c);
      x = {{y.x, y.y, y.z, y.w}};
    } else {
      const auto* from = static_cast<const uint16_t*>(v.data) + at + c;
      const uint2 y = *reinterpret_cast<const uint2*>(from);
      x.bits[0] = y.x, x.bits[1] = y.y;
    }
  } else {
#pragma unroll
    for (int e = 0; e < vector; ++e) {
      if (c + e >= end) continue;
      const int64_t place = at + (c + e) * stride;
      if (v.dtype == DType::f32)
        x.bits[e] = static_cast<const uint32_t*>(v.data)[place];
      else
        x.bits[e / 2] |= uint32_t{static_cast<const uint16_t*>(v.data)[place]} << (16 * (e & 1));
    }
  }
  return x;
}
__device__ __forceinline__ float4 numbers(const View& v, const Four& x, float neutral) {
  if (!v.data) return {neutral, neutral, neutral, neutral};
  const Two a = two_of(v.dtype, {x.bits[0], x.bits[1]});
  const Two b = v.dtype == DType::f32 ? two_of(v.dtype, {x.bits[2], x.bits[3]})
                                      : two_of(v.dtype, {x.bits[1], 0});
  return {a.a, a.b, b.a, b.b};
}
template <bool whole>
__device__ __forceinline__ void put_four(const View& v, int64_t at, int64_t stride, int c, int end,
                                         const float (&x)[vector]) {
  if (whole && v.dtype == DType::f32 && c < end) {
    *reinterpret_cast<float4*>(static_cast<float*>(v.data) + at + c) = {x[0], x[1], x[2], x[3]};
    return;
  }
#pragma unroll
  for (int e = 0; e < vector; ++e)
    if (c + e < end) store(v, at + (c + e) * stride, x[e]);
}

// Sums over the lanes of a warp, each in the order of a tree: of two halves of `count` sums a lane
// hands on one, until it has one sum alone. Sum j ends in x[0] of the lanes from 32 / count * j on.
template <int count, int offset = 16, int size>
__device__ __forceinline__ void warp_sums(float (&x)[size], int lane) {
  if constexpr (offset == 0) {
    return;
  } else if constexpr (count > 1) {
    constexpr int half = count / 2;
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], offset);
      x[i] = (upper ? x[i + half] : x[i]) + other;
    }
    warp_sums<half, offset / 2>(x, lane);
  } else {
    x[0] += __shfl_xor_sync(~0u, x[0], offset);
    warp_sums<1, offset / 2>(x, lane);
  }
}

// Whether each row of a tensor is read by vectors: `extents` of the axes before the last.
inline bool lies_in_vectors(const View& v, std::initializer_list<int64_t> extents) {
  if (!v.data) return true;
  const int64_t bytes = vector * size_of(v.dtype);
  int axis = 0;
  for (const int64_t extent : extents) {
    if (extent > 1 && v.stride[axis] % vector != 0) return false;
    ++axis;
  }
  return v.stride[axis] == 1 &&
         reinterpret_cast<uintptr_t>(v.data) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace talea::mamba3::cuda::one_step
