// What: what the warpgroups of backward share: operands and sums of a chunk, loads of d_out.
// Why: every part of backward reads and writes it by name.
// Never: outlives a slice of chunks.
#pragma once

#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int back_threads = 512;

struct Slice {
  int64_t number = 0;  // of the unit
  int64_t begin = 0, low = 0, high = 0;
};

template <int R, int blocks>
struct BackShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks, apart = pairs + 4;
  using Turns = TurnReader<R, blocks, back_threads>;
  // Lanes of a warp whose rows have the same r: their sums are one.
  static constexpr int alike = 8 / R, lanes = 128 / alike;
  char q[wide_bytes], k[wide_bytes], h[wide_bytes], e[wide_bytes];
  char v[panel_bytes], d_y[panel_bytes];
  // Queries and keys weighed, dO V^T weighed, e^L dO. Before them: sums of turns.
  char seen[panel_bytes], weights[panel_bytes], scaled[panel_bytes];
  float2 state[32 * 128];  // E in fp32, as the last group's accumulators lie
  // Sums over the slice, of the lanes of a group: rows of q and k, values, z, out.
  float rows_q[32 * lanes], rows_k[32 * lanes];
  float by_v[16 * lanes], by_z[16 * lanes], by_out[16 * lanes];
  float2 turns[C * apart];  // cos, sin
  float turn_q[C * apart], turn_k[C * apart];
  float4 q_bias[R * 32], k_bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  Steps<C> steps;
  MoreSteps<C> more;
  RawTokens<C> raw;
  Carried carried;
  float dots_q[rows], dots_k[rows], by_state[rows], by_same[rows];
  float by_later[4][C];    // of each warp
  float torque[2][4][64];  // the same, of this chunk and the one before
  double energy[2][4];
  float by_rate[C], of_step[C];
  double traces[4];
  Unit unit;
  Slice slice;
};

// Neighbours of d_out, zeros where there is none.
struct Upstream {
  const View& v;
  bool pairs = false;   // two are one aligned load of bf16
  bool pieces = false;  // eight are
  __device__ __forceinline__ explicit Upstream(const Args& a) : v(a.d_out) {
    const bool plain = v.data && v.dtype == DType::bf16 && v.stride[4] == 1;
    int64_t low = 0;
    for (int i = 0; i < 4; ++i) low |= v.stride[i];
    const auto address = reinterpret_cast<uintptr_t>(v.data);
    pairs = plain && low % 2 == 0 && address % 4 == 0;
    pieces = plain && low % 8 == 0 && address % 16 == 0;
  }
  __device__ __forceinline__ float2 two(int64_t at) const {
    if (!v.data) return {0, 0};
    if (pairs) {
      const uint32_t x =
          __ldg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(v.data) + at));
      return {low_of(x), high_of(x)};
    }
    return {cuda::read(v, at), cuda::read(v, at + v.stride[4])};
  }
  __device__ __forceinline__ void eight(int64_t at, float (&x)[8]) const {
    if (pieces) {
      const uint4 all =
          __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(v.data) + at));
      const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[2 * i] = low_of(words[i]), x[2 * i + 1] = high_of(words[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = v.data ? cuda::read(v, at + i * v.stride[4]) : 0.0f;
  }
};

// Over the R rows of a token, which lie R lanes of eight apart.
template <int R>
__device__ __forceinline__ float over_ranks(float x) {
#pragma unroll
  for (int step = 4; step < 4 * R; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float over_eight(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// Over the lanes of a warp whose rows have the same r.
template <int R>
__device__ __forceinline__ float over_alike(float x) {
#pragma unroll
  for (int step = 4 * R; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace talea::mamba3::sm90
