// What: the rows of a chunk as operands: copied ahead, turned, gated.
// Why: all warpgroups share it, and read what another launch left.
// Never: stores a turned row.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// The state before chunk i of the segment, as a tile.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::copy_state(int64_t i) {
  constexpr int size = columns * values;
  const auto* from =
      static_cast<const __nv_bfloat16*>(b.inner) + (slice.number * (a.size.segment + 1) + i) * size;
  const uint32_t to = hopper::smem_address(sh.h);
#pragma unroll
  for (int item = threadIdx.x; item < size / 8; item += back_threads)
    hopper::copy_16_bytes(to + static_cast<uint32_t>(place_of(item / 16, item % 16 * 8)),
                          from + item * 8, true);
}

// What the chunk needs is under way.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::begin(int64_t chunk) {
  p = part_of<C>(u, chunk);
  copy_rows<R, back_threads>(a.q, u, p, sh.q, threadIdx.x);
  copy_rows<R, back_threads>(a.k, u, p, sh.k, threadIdx.x);
  if constexpr (R == 1) copy_values<back_threads>(a, u, p, sh.v, threadIdx.x);
  copy_state(chunk - slice.begin);
  raw = static_cast<int>(threadIdx.x) <= C ? raw_token(a, u, p, threadIdx.x) : RawToken{};
}

// Rows of all operands.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::prepare(int64_t chunk) {
  auto& scratch = *reinterpret_cast<typename Shared::Turns::Scratch*>(sh.seen);
  static_assert(sizeof(scratch) <= 3 * panel_bytes);
  typename Shared::Turns turns(threadIdx.x);
  turns.load(a, u, p);
  const RawValues<R, back_threads> own(a, u, p, threadIdx.x);
  sh.raw.put(threadIdx.x, raw);
  if (threadIdx.x < 64) {
    scratch.lost[threadIdx.x] = 0;
    const int64_t at = (slice.number * a.size.segment + chunk - slice.begin) * a.size.pairs;
    if (static_cast<int>(threadIdx.x) < a.size.pairs) {
      sh.carried.turns[threadIdx.x] = b.inner_turns[at + threadIdx.x];
      sh.carried.tainted[threadIdx.x] = b.inner_taints[at + threadIdx.x];
    }
  }
  copies_done();
  __syncthreads();
  if (threadIdx.x < 32)
    read_steps(sh.raw, p, sh.steps, [&](int t, float right, float lambda, float other) {
      sh.more.right[t] = right, sh.more.lambda[t] = lambda, sh.more.other[t] = other;
    });
  turns.add(a, p, sh.raw.dt, scratch, [](int, int, float) {});
  __syncthreads();
  turns.each_turn(a, p, sh.carried, scratch, [&](int t, int j, int pp, const TwoTurns& by) {
    *reinterpret_cast<float4*>(sh.turns + (t + j) * Shared::apart + 2 * pp) = {by.cos0, by.sin0,
                                                                               by.cos1, by.sin1};
  });
  __syncthreads();
  if (a.size.halves)
    turn_rows<true>();
  else
    turn_rows<false>();
  own.put(p, sh.mimo_v, nullptr, sh.v, nullptr);
  gate_rows();
  hopper::fence_async_shared();
  __syncthreads();
}

template <int R, int blocks>
template <bool halves>
__device__ __forceinline__ void Backward<R, blocks>::turn_rows() {
  const int pp = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < rows / 16; ++i) {
    const int row = threadIdx.x / 32 + 16 * i, t = row / R, r = row % R;
    if (t >= p.n) continue;
    TwoTurns by;
    if (2 * pp < Shared::pairs) {
      const float4 x = *reinterpret_cast<const float4*>(sh.turns + t * Shared::apart + 2 * pp);
      by = {x.x, x.y, x.z, x.w};
    }
    turn_row<halves>(sh.q, row, pp, sh.q_bias[r * 32 + pp], by);
    turn_row<halves>(sh.k, row, pp, sh.k_bias[r * 32 + pp], by);
  }
}

// dO and e^L dO: a thread has eight columns of a row.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::gate_rows() {
  const int row = threadIdx.x / 8, t = row / R, r = row % R, c = (threadIdx.x & 7) * 8;
  uint32_t own[4] = {0, 0, 0, 0}, scaled[4] = {0, 0, 0, 0};
  if (t < p.n) {
    const int64_t token = u.begin + p.first + t;
    float x[8];
    up.eight(cuda::at(a.d_out, u.batch, token, a.size.reduce ? 0 : r, u.head, c), x);
    uint4 z = {0, 0, 0, 0};
    if (a.z.data)
      z = __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a.z.data) +
                                               cuda::at(a.z, u.batch, token, u.head, c)));
    const uint32_t words[4] = {z.x, z.y, z.z, z.w};
    const float left = sh.steps.left[t];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] *= sh.mimo_out[r * values + c + i];
      if (a.z.data) {
        const float w =
            (i & 1 ? high_of(words[i / 2]) : low_of(words[i / 2])) * sh.mimo_z[r * values + c + i];
        x[i] *= w * gate_sigmoid(w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[i] = two_rounded(x[2 * i], x[2 * i + 1]);
      scaled[i] = two_rounded(left * x[2 * i], left * x[2 * i + 1]);
    }
  }
  const int at = place_of(row, c);
  *reinterpret_cast<uint4*>(sh.d_y + at) = {own[0], own[1], own[2], own[3]};
  *reinterpret_cast<uint4*>(sh.scaled + at) = {scaled[0], scaled[1], scaled[2], scaled[3]};
}

}  // namespace talea::mamba3::sm90
