// What: the two warpgroups that multiply a head: rows of dq and y for one, rows of dk and dv for the
//       other, and what each step is worth.
// Why: queries and keys are multiplied alike with their tensors exchanged; as one text its
//      instructions are fetched for both.
// Never: waits for the other within a head.
#pragma once

#include "ops/mamba3/sm90/gradients_gates.cuh"
#include "ops/mamba3/sm90/gradients_ranks.cuh"
#include "ops/mamba3/sm90/gradients_values.cuh"

namespace talea::mamba3::sm90 {

// Queries: y = e^L (Q H^T) + seen V and dq = e^L (dO H) + W' K. Keys: dv = e^(L_C - L) s (K E^T) +
// seen^T dO + d dO and dk = e^(L_C - L) s (V E) + W'^T Q.
template <int R, int blocks, bool halves, int slabs>
template <bool handed>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::multiply(bool of_keys) {
  const bool apart = gates_apart();
  const int row = own_row(), lane = thread & 31;
  const Seen sees(of_keys);
  float sums[64];
#pragma unroll
  for (float& x : sums) x = 0;
#pragma unroll 1
  for (int head = place.first; head < place.last; ++head) {
    hopper::named_barrier_sync(full + stage(head), gradient_threads);
    auto& tiles = sh.operands[stage(head)];
    const auto& turned = sh.operands[shared_stage(head)];
    const Operand own(of_keys ? turned.k : turned.q), other(of_keys ? turned.q : turned.k);
    const Operand own_values(of_keys ? tiles.v : tiles.d_y);
    const Operand other_values(of_keys ? tiles.d_y : tiles.v);
    const Operand state(of_keys ? tiles.e : tiles.h);
    const float* const by = of_keys ? steps(head).key : steps(head).left;
    uint32_t seen[4][4], weights[4][4];
    float y[32];  // dv of keys
    {
      float scores[32], products[32], near[2], behind[2], trace;
      hopper::warpgroup_arrive();
      rows_by_rows<128, false>(scores, own, other);
      rows_by_rows<64, false>(products, own_values, other_values);
      products_end(scores);
      hopper::hold_registers(products);
      if constexpr (R == 1)
        weigh(head, of_keys, sees, scores, products, seen, weights, near, behind, trace);
      else
        weigh_ranks(head, of_keys, scores, products, seen, weights, near, behind, trace);
      // Not beside the scores: there are no registers for both, and what is spilled is not near.
      hopper::warpgroup_arrive();
      rows_by_rows<128, false>(y, own, state);
      products_end(y);
      if (of_keys) {
        // Beside what lies behind the chunk.
        float far[2] = {0, 0};
        each_two(y, [&](int i, int c, float x, float w) {
          const uint32_t v = *reinterpret_cast<const uint32_t*>(tiles.v + place_of(i, c));
          far[i != row] = fmaf(w, high_of(v), fmaf(x, low_of(v), far[i != row]));
        });
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const int t = (row + 8 * second) / R;
          const float all =
              over_ranks<R>(over_quad(behind[second] + steps(head).right[t] * far[second]));
          if (lane % (4 * R) == 0) add(head, sh.of_step[shared_stage(head)][t], all);
        }
      } else {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const float all = over_ranks<R>(over_quad(near[second]));
          if (lane % (4 * R) == 0)
            add(head, sh.by_same[shared_stage(head)][(row + 8 * second) / R], all);
        }
        const double own_trace = static_cast<double>(over_warp(trace));
        if (lane == 0) sh.traces[stage(head)][thread / 32] = own_trace;
      }
    }
    scale_rows(y, by);
    products_begin(y);
    registers_by_columns<64>(y, seen, other_values);
    products_end(y);
    if (of_keys)
      values_back<handed>(head, y);
    else if (needs_y() && !apart) {
      if constexpr (Shared::own_gates == 0)
        hand_on(head, y);
      else
        gates_of<Shared::own_gates>(
            head, 0, sh.sums_q, queries, [&] { hand_on(head, y); },
            [&](int j, int second) {
              return float2{y[4 * j + 2 * second], y[4 * j + 2 * second + 1]};
            });
    }
    float g[64];
#pragma unroll
    for (float& x : g) x = 0;
    products_begin(g);
    rows_by_columns<128>(g, own_values, state);
    products_end(g);
    if (apart && !of_keys) {
      // H has been read: y takes its place.
      hopper::named_barrier_sync(queries, 128);
      each_two(y, [&](int i, int c, float x0, float x1) {
        *reinterpret_cast<float2*>(tiles.h + Shared::y_at(i, c)) = {x0, x1};
      });
      hopper::named_barrier_arrive(y_known + stage(head), 256);
    }
    scale_rows(g, by);
    products_begin(g);
    registers_by_columns<128>(g, weights, other);
    products_end(g);
    rows_back<handed>(head, of_keys, g, sums);
  }
  if (of_keys)
    store_rows<true>(sums);
  else
    store_rows<false>(sums);
}

}  // namespace talea::mamba3::sm90
