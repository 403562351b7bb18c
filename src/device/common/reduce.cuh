// What: sums, maxima and minima over a warp and a block, in a fixed order.
// Why: every reduction of the lanes is bitwise repeatable.
// Never: uses atomics.
#pragma once

#include <cstdint>

namespace talea::device {

inline constexpr int warp_size = 32;
inline constexpr unsigned whole_warp = 0xffffffffu;

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// NaN loses: the sums beside a maximum carry it.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

struct Min {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

template <typename T, typename Op>
__device__ T warp_reduce(T value, Op op) {
  for (int offset = warp_size / 2; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(whole_warp, value, offset));
  return value;
}

// Every thread gets the result. `shared` holds one T a warp and is free again afterwards.
template <typename T, typename Op>
__device__ T block_reduce(T value, Op op, T* shared) {
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int warps = blockDim.x / warp_size;
  value = warp_reduce(value, op);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  T all = shared[0];
  for (int w = 1; w < warps; ++w) all = op(all, shared[w]);
  __syncthreads();
  return all;
}

}  // namespace talea::device
