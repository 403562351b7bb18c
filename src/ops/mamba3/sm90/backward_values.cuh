// What: rows of dv behind the last product: the skip's share, the projection and its gradient.
// Why: the accumulator of the keys has them whole.
// Never: waits for the queries.
#pragma once

#include "ops/mamba3/sm90/backward_pairs.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::values_back(int head,
                                                                         const float (&dv)[32]) {
  constexpr int alike = Shared::alike, together = R < 2 ? 2 : R;
  const int row = own_row(), column = own_column(), r = row % R;
  const float skip = sh.skip;
  const OutRows to_dv = out_rows(a.grad.v, sh.homes.d_v, head, column + 8 * r);
  const int64_t v0 = home(sh.homes.v, a.v, head) + column;
  const __nv_bfloat16* const v_at[2] = {in_row(a.v, v0, 0), in_row(a.v, v0, 1)};
  float to[16];
#pragma unroll
  for (int first = 0; first < 8; first += together) {
    float x[2][2][together];  // of the rows and neighbours, columns eight apart
    uint32_t v[together][2] = {};
    if (a.grad.mimo_v.data) {
#pragma unroll
      for (int k = 0; k < together; ++k)
#pragma unroll
        for (int second = 0; second < 2; ++second)
          v[k][second] = __ldg(reinterpret_cast<const uint32_t*>(v_at[second] + 8 * (first + k)));
    }
#pragma unroll
    for (int k = 0; k < together; ++k) {
      const int j = first + k, c = column + 8 * j;
      const float2 by = *reinterpret_cast<const float2*>(sh.mimo_v + r * values + c);
      to[2 * j] = to[2 * j + 1] = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float own[2] = {dv[4 * j + 2 * second], dv[4 * j + 2 * second + 1]};
        const uint32_t up_here =
            *reinterpret_cast<const uint32_t*>(sh.d_y + place_of(row + 8 * second, c));
        if (skip != 0) own[0] += skip * low_of(up_here), own[1] += skip * high_of(up_here);
        to[2 * j] = fmaf(own[0], low_of(v[k][second]), to[2 * j]);
        to[2 * j + 1] = fmaf(own[1], high_of(v[k][second]), to[2 * j + 1]);
        x[second][0][k] = own[0] * by.x, x[second][1][k] = own[1] * by.y;
      }
    }
    if (!a.grad.v.data) continue;
#pragma unroll
    for (int second = 0; second < 2; ++second)
#pragma unroll
      for (int k = 0; k < together; k += R) {
        float low[R], high[R];
#pragma unroll
        for (int i = 0; i < R; ++i) low[i] = x[second][0][k + i], high[i] = x[second][1][k + i];
        const float y = shared_by_ranks<R>(low), w = shared_by_ranks<R>(high);
        to_dv.store(second, 8 * (first + k), y, w);
      }
  }
  if (!a.grad.mimo_v.data) return;
#pragma unroll
  for (int slot = 0; slot < 16; slot += alike) {
    float x[alike];
#pragma unroll
    for (int i = 0; i < alike; ++i) x[i] = to[slot + i];
    put_alike(sh.by_value[0], slot, x);
  }
}

}  // namespace talea::mamba3::sm90
