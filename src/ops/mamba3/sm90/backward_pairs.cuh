// What: Q K^T and dO V^T weighed, a quarter of the keys a warpgroup; then the rows of dv by the first.
// Why: dO V^T is formed once and serves every group; none waits for another to weigh all of it.
// Never: multiplies what a query does not see.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::weigh_pairs() {
  float scores[8], products[8];
  hopper::warpgroup_arrive();
  rows_by_some_rows<128>(scores, Operand(sh.q), Operand(sh.k), group);
  rows_by_some_rows<64>(products, Operand(sh.d_y), Operand(sh.v), group);
  products_end(scores);
  hopper::hold_registers(products);
  const int row = own_row(), column = own_column() + 16 * group, lane = threadIdx.x & 31;
  const int t[2] = {row / R, (row + 8) / R};
  const float4 own[2] = {sh.steps.pair[t[0]], sh.steps.pair[t[1]]};
  const int warp = thread / 32, last = (warp * 16 + 15) / R;
  float near[2] = {0, 0}, trace = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float x[2][2] = {{0, 0}, {0, 0}}, w[2][2] = {{0, 0}, {0, 0}}, far[2] = {0, 0};
    if ((16 * group + 8 * j) / R <= last) {
      float4 key = sh.steps.pair[(column + 8 * j) / R];
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float decay = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = column + 8 * j + i, earlier = at / R;
          if (R == 1) key = sh.steps.pair[at];
          const float score = scores[4 * j + 2 * second + i];
          const float product = products[4 * j + 2 * second + i];
          if (t[second] > earlier && t[second] < p.n) {
            if (R == 1 || i == 0) decay = decay_of(own[second], key);
            x[second][i] = key.z * decay * score;
            w[second][i] = key.z * decay * product;
            far[i] += decay * product * score;
          } else if (t[second] == earlier && t[second] < p.n) {
            x[second][i] = key.w * score;
            w[second][i] = key.w * product;
            near[second] += product * score;
            if (row + 8 * second == at) trace += product;
          }
        }
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int at = place_of(row + 8 * second, column + 8 * j);
      *reinterpret_cast<uint32_t*>(sh.seen + at) = two_rounded(x[second][0], x[second][1]);
      *reinterpret_cast<uint32_t*>(sh.weights + at) = two_rounded(w[second][0], w[second][1]);
    }
    if constexpr (R == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float all = over_eight(far[i]);
        if (lane < 4) sh.by_later[warp][column + 8 * j + i] = all;
      }
    } else {
      float all = over_eight(far[0] + far[1]);
      if constexpr (R == 4) all += __shfl_xor_sync(0xffffffffu, all, 1);
      if (lane < 4 && (R == 2 || lane % 2 == 0)) sh.by_later[warp][(column + 8 * j) / R] = all;
    }
  }
  // Rows of the same token lie among the keys of one group.
  if (group == warp) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const float all = over_quad(near[second]);
      if (lane % 4 == 0) sh.by_same[row + 8 * second] = all;
    }
    const double own_trace = static_cast<double>(over_warp(trace));
    if (lane == 0) sh.traces[warp] = own_trace;
  }
  hopper::fence_async_shared();
}

// dv = e^(L_C - L) s (K E^T) + seen^T dO + d dO.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::pairs_and_values(int head) {
  float dv[32];
  const int row = own_row(), lane = threadIdx.x & 31;
  const int t[2] = {row / R, (row + 8) / R};
  hopper::warpgroup_arrive();
  rows_by_rows<128, false>(dv, Operand(sh.k), Operand(sh.e));
  products_end(dv);
  float far[2] = {0, 0};
  each_two(dv, [&](int i, int c, float x, float y) {
    const uint32_t v = *reinterpret_cast<const uint32_t*>(sh.v + place_of(i, c));
    far[i != row] += x * low_of(v) + y * high_of(v);
  });
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const float all = over_quad(far[second]);
    if (lane % 4 == 0) sh.by_state[row + 8 * second] = sh.more.right[(row + 8 * second) / R] * all;
  }
  scale_rows(dv, sh.steps.key);
  hopper::named_barrier_sync(weighed, back_threads);
  products_begin(dv);
  columns_by_columns<64>(dv, Operand(sh.seen), Operand(sh.d_y));
  products_end(dv);
  hopper::named_barrier_arrive(used, back_threads);
  const auto* const v0 = static_cast<const __nv_bfloat16*>(a.v.data) + homes(head).v + own_column();
  uint32_t v[16];
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int second = 0; second < 2; ++second)
      v[2 * j + second] =
          a.grad.mimo_v.data && t[second] < p.n
              ? __ldg(reinterpret_cast<const uint32_t*>(v0 + t[second] * a.v.stride[1] + 8 * j))
              : 0u;
  values_back(head, dv, v);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::values_back(int head,
                                                                         const float (&dv)[32],
                                                                         const uint32_t (&v)[16]) {
  const Homes& home = homes(head);
  const int row = own_row(), column = own_column(), r = row % R;
  const float skip = home.skip;
  const int64_t dv0 = home.d_v + column;
  const int t[2] = {row / R, (row + 8) / R};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int c = column + 8 * j;
    const float2 by = *reinterpret_cast<const float2*>(sh.mimo_v + r * values + c);
    float to[2] = {0, 0};
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      float x = dv[4 * j + 2 * second], y = dv[4 * j + 2 * second + 1];
      if (skip != 0) {
        const uint32_t up_here =
            *reinterpret_cast<const uint32_t*>(sh.d_y + place_of(row + 8 * second, c));
        x += skip * low_of(up_here), y += skip * high_of(up_here);
      }
      if (t[second] < p.n)
        to[0] += x * low_of(v[2 * j + second]), to[1] += y * high_of(v[2 * j + second]);
      if (a.grad.v.data) {
        x = over_ranks<R>(x * by.x), y = over_ranks<R>(y * by.y);
        if (t[second] < p.n && j % R == r)
          store_two(a.grad.v, dv0 + t[second] * a.grad.v.stride[1] + 8 * j, x, y);
      }
    }
    if (a.grad.mimo_v.data) {
      put_alike(sh.by_v, 2 * j, to[0]);
      put_alike(sh.by_v, 2 * j + 1, to[1]);
    }
  }
}

// A sum over the chunk of what all lanes of a warp with the same r have.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_alike(float* sums, int slot,
                                                                       float x) {
  x = over_alike<R>(x);
  const int lane = thread & 31;
  if (lane < 4 * R) sums[slot * Shared::lanes + thread / 32 * 4 * R + lane] = x;
}

template <int R, int blocks, bool halves>
template <int count>
__device__ __forceinline__ void Backward<R, blocks, halves>::scale_rows(float (&d)[count],
                                                                        const float* by) {
  const int row = own_row();
  const float first = by[row / R], second = by[(row + 8) / R];
#pragma unroll
  for (int j = 0; j < count; ++j) d[j] *= j / 2 % 2 ? second : first;
}

}  // namespace talea::mamba3::sm90
