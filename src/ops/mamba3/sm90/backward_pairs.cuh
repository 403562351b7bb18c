// What: Q K^T and dO V^T weighed, a quarter of the keys a warpgroup; then the rows of dv by the first.
// Why: dO V^T is formed once and serves every group; none waits for another to weigh all of it.
// Never: multiplies what a query does not see.
#pragma once

#include "ops/mamba3/sm90/backward_units.cuh"

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
  const float4 own[2] = {steps().pair[t[0]], steps().pair[t[1]]};
  const int warp = thread / 32, last = (warp * 16 + 15) / R;
  float near[2] = {0, 0}, trace = 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float x[2][2] = {{0, 0}, {0, 0}}, w[2][2] = {{0, 0}, {0, 0}}, far[2] = {0, 0};
    if ((16 * group + 8 * j) / R <= last) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float4 key;
        float decay = 0, by = 0;
        bool later = false, sees = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = column + 8 * j + i, earlier = at / R;
          if (R == 1 || i == 0) {
            key = steps().pair[earlier];
            // Of later keys it may be infinite: chosen, not multiplied.
            decay = decay_of(own[second], key);
            later = t[second] > earlier;
            sees = t[second] >= earlier && t[second] < p.n;
            by = later ? key.z * decay : key.w;
          }
          const float score = scores[4 * j + 2 * second + i];
          const float product = products[4 * j + 2 * second + i];
          const float both = product * score;
          x[second][i] = sees ? by * score : 0.0f;
          w[second][i] = sees ? by * product : 0.0f;
          far[i] += sees && later ? decay * both : 0.0f;
          near[second] += sees && !later ? both : 0.0f;
          trace += sees && row + 8 * second == at ? product : 0.0f;
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
      if constexpr (R >= 4) all += __shfl_xor_sync(0xffffffffu, all, 1);
      if constexpr (R == 8) all += __shfl_xor_sync(0xffffffffu, all, 2);
      if (lane < 4 && (R == 2 || lane % (R / 2) == 0))
        sh.by_later[warp][(column + 8 * j) / R] = all;
    }
  }
  // Rows of the same token lie among the keys of one group.
  if (group == warp) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const float all = over_quad(near[second]);
      if (lane % 4 == 0) sh.by_same[row + 8 * second] = all;
    }
    if (cut.whole) {
      const double own_trace = static_cast<double>(over_warp(trace));
      if (lane == 0) sh.traces[warp] = own_trace;
    }
  }
  hopper::fence_async_shared();
}

// dv = e^(L_C - L) s (K E^T) + seen^T dO + d dO.
template <int R, int blocks, bool halves>
template <bool handed>
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
    if (lane % 4 == 0) sh.by_state[row + 8 * second] = steps().right[(row + 8 * second) / R] * all;
  }
  scale_rows(dv, steps().key);
  hopper::named_barrier_sync(weighed, back_threads);
  products_begin(dv);
  columns_by_columns<64>(dv, Operand(sh.seen), Operand(sh.d_y));
  products_end(dv);
  hopper::named_barrier_arrive(used, back_threads);
  if (thread < pairs) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < 16; ++w) all += sh.torque[w][thread];
    sh.torques[thread] = all;
  }
  if (!sum_of_parts(head, 1, dv)) return;
  const auto* const v0 =
      static_cast<const __nv_bfloat16*>(a.v.data) + home(sh.homes.v, a.v, head) + own_column();
  uint32_t v[16];
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int second = 0; second < 2; ++second)
      v[2 * j + second] =
          a.grad.mimo_v.data && t[second] < p.n
              ? __ldg(reinterpret_cast<const uint32_t*>(v0 + t[second] * a.v.stride[1] + 8 * j))
              : 0u;
  values_back<handed>(head, dv, v);
}

template <int R, int blocks, bool halves>
template <bool handed>
__device__ __forceinline__ void Backward<R, blocks, halves>::values_back(int head,
                                                                         const float (&dv)[32],
                                                                         const uint32_t (&v)[16]) {
  constexpr int alike = Shared::alike;
  const int row = own_row(), column = own_column(), r = row % R;
  const float skip = sh.skip;
  const int t[2] = {row / R, (row + 8) / R};
  const int64_t dv0 = home(sh.homes.d_v, a.grad.v, head) + column;
  float to[16];
#pragma unroll
  for (int first = 0; first < 8; first += R) {
    float x[2][2][R];  // of the rows and neighbours, for R columns apart
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int j = first + k, c = column + 8 * j;
      const float2 by = *reinterpret_cast<const float2*>(sh.mimo_v + projection_at(r, c));
      to[2 * j] = to[2 * j + 1] = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float own[2] = {dv[4 * j + 2 * second], dv[4 * j + 2 * second + 1]};
        if (skip != 0) {
          const uint32_t up_here =
              *reinterpret_cast<const uint32_t*>(sh.d_y + place_of(row + 8 * second, c));
          own[0] += skip * low_of(up_here), own[1] += skip * high_of(up_here);
        }
        if (t[second] < p.n) {
          to[2 * j] += own[0] * low_of(v[2 * j + second]);
          to[2 * j + 1] += own[1] * high_of(v[2 * j + second]);
        }
        x[second][0][k] = own[0] * by.x, x[second][1][k] = own[1] * by.y;
      }
    }
    if (!a.grad.v.data) continue;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      float low = shared_by_ranks<R>(x[second][0]), high = shared_by_ranks<R>(x[second][1]);
      if constexpr (handed)
        if (t[second] == p.n - 1 && !p.more && a.last.v.data)
          add_last_value(a, sh.unit, head, column + 8 * (first + r), low, high);
      if (t[second] < p.n)
        store_two(a.grad.v, dv0 + t[second] * a.grad.v.stride[1] + 8 * (first + r), low, high);
    }
  }
  if (!a.grad.mimo_v.data) return;
#pragma unroll
  for (int slot = 0; slot < 16; slot += alike) {
    float x[alike];
#pragma unroll
    for (int i = 0; i < alike; ++i) x[i] = to[slot + i];
    put_alike<R>(sh.by_v, slot, x);
  }
}

// Sums over the chunk of what all lanes of a warp with the same r have, of neighbouring slots.

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
