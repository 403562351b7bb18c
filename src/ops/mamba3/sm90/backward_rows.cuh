// What: the second and the third warpgroup: rows of dq and dk, turned back.
// Why: one text for both, so that both run through the same instructions.
// Never: sums over heads.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// dq = e^L (dO H) + W' K by one group, dk = e^(L_C - L) s (V E) + W'^T Q by another: one text, so
// that both run through the same instructions.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::rows_of_group(int64_t chunk) {
  const bool keys = group == 2;
  float g[64];
#pragma unroll
  for (float& x : g) x = 0;
  products_begin(g);
  rows_by_columns<128>(g, Operand(keys ? sh.v : sh.d_y), Operand(keys ? sh.e : sh.h));
  products_end(g);
  if (keys) hopper::named_barrier_arrive(upstream_read, 256);
  scale_rows(g, keys ? sh.steps.key : sh.steps.left);
  hopper::named_barrier_sync(weighed, back_threads);
  if (keys) {
    products_begin(g);
    columns_by_columns<128>(g, Operand(sh.weights), Operand(sh.q));
    products_end(g);
  } else {
    products_begin(g);
    rows_by_columns<128>(g, Operand(sh.weights), Operand(sh.k));
    products_end(g);
  }
  if (a.size.halves)
    rows_back<true>(chunk, g);
  else
    rows_back<false>(chunk, g);
}

template <int R, int blocks>
template <int count>
__device__ __forceinline__ void Backward<R, blocks>::scale_rows(float (&d)[count],
                                                                const float* by) {
  const int row = own_row();
  const float first = by[row / R], second = by[(row + 8) / R];
#pragma unroll
  for (int j = 0; j < count; ++j) d[j] *= j / 2 % 2 ? second : first;
}

// Rows of dq or dk: their share of turns and decays; turned back, handed to the sum over heads.
template <int R, int blocks>
template <bool halves>
__device__ __forceinline__ void Backward<R, blocks>::rows_back(int64_t chunk, float (&g)[64]) {
  const bool keys = group == 2;
  const char* const tile = keys ? sh.k : sh.q;
  float* const to = keys ? b.dk : b.dq;
  float* const torques = keys ? sh.turn_k : sh.turn_q;
  float* const dots = keys ? sh.dots_k : sh.dots_q;
  float* const sums = keys ? sh.rows_k : sh.rows_q;
  const bool wanted = keys ? a.grad.k_bias.data : a.grad.q_bias.data;
  const int row = own_row(), column = own_column(), r = row % R, lane = threadIdx.x & 31;
  const int A = a.size.pairs;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int own = row + 8 * second, t = own / R;
    const bool known = t < p.n;
    float dot = 0;
    const auto one = [&](int pair, float x, float w, float& gx, float& gw) {
      dot += x * gx + w * gw;
      if (pair >= A) return;  // of a whole block of lanes, or of its end
      const float2 by = sh.turns[t * Shared::apart + pair];
      const float cos = known ? by.x : 1.0f, sin = known ? by.y : 0.0f;
      const float before = gx;
      gx = before * cos + gw * sin;
      gw = gw * cos - before * sin;
    };
    const auto torque = [&](int pair, float x, float w, float gx, float gw) {
      const float all = over_ranks<R>(x * gw - w * gx);
      if (pair < A && r == 0) torques[t * Shared::apart + pair] = all;
    };
    if constexpr (halves) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const char* at = tile + place_of(own, column + 8 * j);
        const uint32_t x = *reinterpret_cast<const uint32_t*>(at);
        const uint32_t w = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
        float* gx = g + 4 * j + 2 * second;
        float* gw = g + 4 * (j + 8) + 2 * second;
        const int pair = column + 8 * j;
        if (8 * j < A) {
          torque(pair, low_of(x), low_of(w), gx[0], gw[0]);
          torque(pair + 1, high_of(x), high_of(w), gx[1], gw[1]);
        }
        one(pair, low_of(x), low_of(w), gx[0], gw[0]);
        one(pair + 1, high_of(x), high_of(w), gx[1], gw[1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint32_t both =
            *reinterpret_cast<const uint32_t*>(tile + place_of(own, column + 8 * j));
        float* gx = g + 4 * j + 2 * second;
        const int pair = 4 * j + lane % 4;
        if (4 * j < A) torque(pair, low_of(both), high_of(both), gx[0], gx[1]);
        one(pair, low_of(both), high_of(both), gx[0], gx[1]);
      }
    }
    dot = over_quad(dot);
    if (lane % 4 == 0) dots[own] = dot;
    if (to && known) {
      const int64_t place =
          ((u.sequence - wave.first) * wave.slice_chunks + (chunk - slice.low)) * C + t;
      float* const line = to + ((place * R + r) * a.size.heads + u.head) * columns + column;
#pragma unroll
      for (int j = 0; j < 16; ++j)
        *reinterpret_cast<float2*>(line + 8 * j) = {g[4 * j + 2 * second],
                                                    g[4 * j + 2 * second + 1]};
    }
  }
  if (!wanted) return;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) add_alike(sums, 2 * j + i, g[4 * j + i] + g[4 * j + 2 + i]);
}

}  // namespace talea::mamba3::sm90
