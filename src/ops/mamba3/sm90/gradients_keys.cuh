// What: the warpgroup of the keys: rows of dk and of dv, and what each step is worth.
// Why: what later queries give a key is a row of its accumulator.
// Never: waits for the queries.
#pragma once

#include "ops/mamba3/sm90/gradients_rows.cuh"

namespace talea::mamba3::sm90 {

// dv = e^(L_C - L) s (K E^T) + seen^T dO + d dO, dk = e^(L_C - L) s (V E) + W'^T Q.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::multiply_keys() {
  const int row = own_row(), lane = thread & 31;
  float sums[64];
#pragma unroll
  for (float& x : sums) x = 0;
#pragma unroll 1
  for (int head = place.first; head < place.last; ++head) {
    hopper::named_barrier_sync(full + stage(head), gradient_threads);
    const auto& tiles = sh.operands[stage(head)];
    uint32_t seen[4][4], weights[4][4];
    float dv[32], later[2];
    {
      float scores[32], products[32], trace;
      hopper::warpgroup_arrive();
      rows_by_rows<128, false>(scores, Operand(tiles.k), Operand(tiles.q));
      rows_by_rows<64, false>(products, Operand(tiles.v), Operand(tiles.d_y));
      rows_by_rows<128, false>(dv, Operand(tiles.k), Operand(tiles.e));
      products_end(scores);
      hopper::hold_registers(products);
      hopper::hold_registers(dv);
      weigh<true>(head, scores, products, seen, weights, later, trace);
    }
    float far[2] = {0, 0};
    each_two(dv, [&](int i, int c, float x, float y) {
      const uint32_t v = *reinterpret_cast<const uint32_t*>(tiles.v + place_of(i, c));
      far[i != row] += x * low_of(v) + y * high_of(v);
    });
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int t = (row + 8 * second) / R;
      const float own = later[second] + steps(head).right[t] * far[second];
      const float all = over_ranks<R>(over_quad(own));
      if (lane % (4 * R) == 0) sh.of_step[stage(head)][t] = all;
    }
    scale_rows(dv, steps(head).key);
    products_begin(dv);
    registers_by_columns<64>(dv, seen, Operand(tiles.d_y));
    products_end(dv);
    values_back(head, dv);
    float dk[64];
#pragma unroll
    for (float& x : dk) x = 0;
    products_begin(dk);
    rows_by_columns<128>(dk, Operand(tiles.v), Operand(tiles.e));
    products_end(dk);
    scale_rows(dk, steps(head).key);
    products_begin(dk);
    registers_by_columns<128>(dk, weights, Operand(tiles.q));
    products_end(dk);
    rows_back<true>(head, dk, sums);
  }
  store_rows<true>(sums);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Gradients<R, blocks, halves>::values_back(int head,
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
    const auto* const v0 =
        static_cast<const __nv_bfloat16*>(a.v.data) + home(sh.homes.v, a.v, head) + column;
    float to[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      to[2 * j] = to[2 * j + 1] = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        if (t[second] >= n) continue;
        const uint32_t v =
            __ldg(reinterpret_cast<const uint32_t*>(v0 + t[second] * a.v.stride[1] + 8 * j));
        to[2 * j] += dv[4 * j + 2 * second] * low_of(v);
        to[2 * j + 1] += dv[4 * j + 2 * second + 1] * high_of(v);
      }
    }
    hopper::named_barrier_sync(keys, 128);
#pragma unroll
    for (int slot = 0; slot < 16; slot += alike) {
      float x[alike];
#pragma unroll
      for (int i = 0; i < alike; ++i) x[i] = to[slot + i];
      put_alike(sh.sums_k, slot, x);
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
        const float2 by = *reinterpret_cast<const float2*>(parameters.mimo_v + c);
        x *= by.x, y *= by.y;
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
          *reinterpret_cast<const float2*>(parameters.mimo_v + r * values + column + 8 * j);
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        x[second][0][k] = dv[4 * j + 2 * second] * by.x;
        x[second][1][k] = dv[4 * j + 2 * second + 1] * by.y;
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const float low = shared_by_ranks<R>(x[second][0]), high = shared_by_ranks<R>(x[second][1]);
      if (t[second] < n)
        store_two(a.grad.v, dv0 + t[second] * a.grad.v.stride[1] + 8 * (first + r), low, high);
    }
  }
}

}  // namespace talea::mamba3::sm90
