// What: rows of dv behind the last product: the skip's share, the projection and its gradient.
// Why: the accumulator of the keys has them whole.
// Never: waits for the queries.
#pragma once

#include "ops/mamba3/sm90/gradients_rows.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves, int slabs>
template <bool handed>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::values_back(int head,
                                                                                 float (&dv)[32]) {
  constexpr int alike = Shared::alike;
  const auto& parameters = sh.of_head[stage(head)];
  const char* const up_tile = sh.operands[stage(head)].d_y;
  const int row = own_row(), column = own_column(), r = row % R;
  const float skip = parameters.skip;
  const int t[2] = {row / R, (row + 8) / R};
  if (skip != 0)
    each_two(dv, [&](int i, int c, float& x, float& y) {
      const uint32_t own = *reinterpret_cast<const uint32_t*>(up_tile + place_of(i, c));
      x += skip * low_of(own), y += skip * high_of(own);
    });
  float* const projections = reinterpret_cast<float*>(sh.from.partial.of(head)) + 2 * R * columns;
  if (a.grad.mimo_v.data) {
    const auto* at = static_cast<const __nv_bfloat16*>(a.v.data) + home(sh.homes.v, a.v, head) +
                     t[0] * a.v.stride[1] + column;
    float to[16];
#pragma unroll
    for (float& x : to) x = 0;
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      if (t[second] < n) {
        uint32_t v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldg(reinterpret_cast<const uint32_t*>(at + 8 * j));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          to[2 * j] = fmaf(dv[4 * j + 2 * second], low_of(v[j]), to[2 * j]);
          to[2 * j + 1] = fmaf(dv[4 * j + 2 * second + 1], high_of(v[j]), to[2 * j + 1]);
        }
      }
      at += 8 / R * a.v.stride[1];
    }
    hopper::named_barrier_sync(keys, 128);
#pragma unroll
    for (int slot = 0; slot < 16; slot += alike) {
      float x[alike];
#pragma unroll
      for (int i = 0; i < alike; ++i) x[i] = to[slot + i];
      put_alike<R>(sh.sums_k, slot, x);
    }
    hopper::named_barrier_sync(keys, 128);
    store_alike(sh.sums_k, R * values, values, projections);
  } else {
    for (int i = thread; i < R * values; i += 128) projections[i] = 0;
  }
  if (!a.grad.v.data) return;
  if constexpr (R == 1) {
    if (a.mimo_v.data)
      each_two(dv, [&](int, int c, float& x, float& y) {
        const float2 by = *reinterpret_cast<const float2*>(parameters.mimo_v + projection_at(0, c));
        x *= by.x, y *= by.y;
      });
    if constexpr (handed)
      if (!sh.part.more && a.last.v.data)
        each_two(dv, [&](int i, int c, float& x, float& y) {
          if (i == n - 1) add_last_value(a, sh.unit, head, c, x, y);
        });
    store_values(a.grad.v, home(sh.homes.d_v, a.grad.v, head), n, dv);
    return;
  }
  const int64_t dv0 = home(sh.homes.d_v, a.grad.v, head) + column;
#pragma unroll
  for (int first = 0; first < 8; first += R) {
    float x[2][2][R];  // of the rows and neighbours, for R columns apart
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int j = first + k;
      const float2 by =
          *reinterpret_cast<const float2*>(parameters.mimo_v + projection_at(r, column + 8 * j));
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        x[second][0][k] = dv[4 * j + 2 * second] * by.x;
        x[second][1][k] = dv[4 * j + 2 * second + 1] * by.y;
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      float low = shared_by_ranks<R>(x[second][0]), high = shared_by_ranks<R>(x[second][1]);
      if constexpr (handed)
        if (t[second] == n - 1 && !sh.part.more && a.last.v.data)
          add_last_value(a, sh.unit, head, column + 8 * (first + r), low, high);
      if (t[second] < n)
        store_two(a.grad.v, dv0 + t[second] * a.grad.v.stride[1] + 8 * (first + r), low, high);
    }
  }
}

}  // namespace talea::mamba3::sm90
