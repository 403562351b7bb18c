// What: the products of a head by two warpgroups: y and rows of dq by one, rows of dv and dk by the
//       other, pairs of rows weighed in the registers of each.
// Why: queries and keys are multiplied alike with their tensors exchanged; neither waits for the
//      other to weigh.
// Never: multiplies what a query does not see.
#pragma once

#include "ops/mamba3/sm90/backward_form.cuh"

namespace talea::mamba3::sm90 {

// Pairs weighed, a row of the accumulator a query or a key; what its decays leave of both products
// (`behind`, the pair of one token left out), and what the rows of one token have.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::weigh(
    int head, const float (&scores)[32], const float (&products)[32], uint32_t (&seen)[4][4],
    uint32_t (&weights)[4][4], float (&behind)[2]) {
  constexpr int per = Table<R>::per;
  const int row = own_row(), column = own_column(), warp = thread / 32, lane = thread & 31;
  const int t[2] = {row / R, (row + 8) / R};
  const float* const table = sh.of_group[of_keys ? 1 : 0].table.of;
  const float4 of_row[2] = {steps(head).pair[t[0]], steps(head).pair[t[1]]};
  const float by_row[2] = {of_keys ? of_row[0].z : 1.0f, of_keys ? of_row[1].z : 1.0f};
  float near[2] = {0, 0}, trace = 0;
  behind[0] = behind[1] = 0;
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    // Of R = 1 neighbours are of two tokens.
    constexpr int tokens = R == 1 ? 2 : 1;
    float decays[2][tokens][4];
#pragma unroll
    for (int second = 0; second < 2; ++second)
#pragma unroll
      for (int i = 0; i < tokens; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(table + t[second] * Table<R>::width +
                                                          (column / R + i) * 8 + first);
        decays[second][i][0] = x.x, decays[second][i][1] = x.y;
        decays[second][i][2] = x.z, decays[second][i][3] = x.w;
      }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = first + k;
      float x[2][2] = {{0, 0}, {0, 0}}, w[2][2] = {{0, 0}, {0, 0}};
      if (of_keys ? j / 2 > warp : j / 2 < warp) {
#pragma unroll
        for (int second = 0; second < 2; ++second)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 4 * j + 2 * second + i;
            const float decay = decays[second][R == 1 ? i : 0][k], by = decay * by_row[second];
            behind[second] = fmaf(decay, products[at] * scores[at], behind[second]);
            x[second][i] = by * scores[at], w[second][i] = by * products[at];
          }
      } else if (j / 2 == warp) {
#pragma unroll
        for (int second = 0; second < 2; ++second)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 4 * j + 2 * second + i,
                      other = per * j + (column + (R == 1 ? i : 0)) / R;
            const bool apart = of_keys ? other > t[second] : other < t[second];
            const bool same = other == t[second];
            const float decay = decays[second][R == 1 ? i : 0][k];
            const float both = products[at] * scores[at];
            const float by = same ? of_row[second].w : decay * by_row[second];
            behind[second] += apart ? decay * both : 0.0f;
            near[second] += same ? both : 0.0f;
            trace += row + 8 * second == 8 * j + column + i ? products[at] : 0.0f;
            x[second][i] = apart || same ? by * scores[at] : 0.0f;
            w[second][i] = apart || same ? by * products[at] : 0.0f;
          }
      }
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        seen[j / 2][(j & 1) * 2 + second] = two_rounded(x[second][0], x[second][1]);
        weights[j / 2][(j & 1) * 2 + second] = two_rounded(w[second][0], w[second][1]);
      }
    }
  }
  if (of_keys) return;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const float all = over_ranks<R>(over_quad(near[second]));
    if (lane % (4 * R) == 0) sh.by_same[t[second]] = all;
  }
  const double own_trace = static_cast<double>(over_warp(trace));
  if (lane == 0) sh.traces[warp] = own_trace;
}

// Queries: y = e^L (Q H^T) + seen V and dq = e^L (dO H) + W' K. Keys: dv = e^(L_C - L) s (K E^T) +
// seen^T dO + d dO and dk = e^(L_C - L) s (V E) + W'^T Q.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::multiply(int head) {
  const bool needs_y = a.grad.mimo_out.data || (a.z.data && (a.grad.z.data || a.grad.mimo_z.data));
  const Operand rows_of(of_keys ? sh.k : sh.q), other(of_keys ? sh.q : sh.k);
  const char* const values_tile = of_keys ? sh.v : sh.d_y;
  const Operand own_values(values_tile), other_values(of_keys ? sh.d_y : sh.v);
  const Operand state(of_keys ? sh.e : sh.h);
  const float* const by = of_keys ? steps(head).key : steps(head).left;
  uint32_t weights[4][4];
  {
    float y[32];  // dv of keys
    uint32_t seen[4][4];
    {
      float behind[2];
      {
        float scores[32], products[32];
        hopper::warpgroup_arrive();
        rows_by_rows<128, false>(scores, rows_of, other);
        rows_by_rows<64, false>(products, own_values, other_values);
        products_end(scores);
        hopper::hold_registers(products);
        weigh(head, scores, products, seen, weights, behind);
      }
      // Not beside the scores: there are no registers for both.
      hopper::warpgroup_arrive();
      rows_by_rows<128, false>(y, rows_of, state);
      products_end(y);
      // Beside what the state leaves: of queries the state before, of keys that behind.
      const int row = own_row(), lane = thread & 31;
      const float* const by_state = of_keys ? steps(head).right : steps(head).left;
      float far[2] = {0, 0};
      each_two(y, [&](int i, int c, float x, float w) {
        const uint32_t v = *reinterpret_cast<const uint32_t*>(values_tile + place_of(i, c));
        far[i != row] = fmaf(w, high_of(v), fmaf(x, low_of(v), far[i != row]));
      });
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int t = (row + 8 * second) / R;
        const float all = over_ranks<R>(over_quad(fmaf(by_state[t], far[second], behind[second])));
        if (lane % (4 * R) == 0) (of_keys ? sh.of_step : sh.of_query)[t] = all;
      }
    }
    if (of_keys || needs_y) {
      scale_rows(y, by);
      products_begin(y);
      registers_by_columns<64>(y, seen, other_values);
      products_end(y);
    }
    if (of_keys)
      values_back(head, y);
    else if (needs_y && (up.pairs || !a.d_out.data))
      gates_of<true>(head, y);
    else if (needs_y)
      gates_of<false>(head, y);
  }
  hopper::named_barrier_arrive(of_keys ? keys_through : queries_through, 256);
  float g[64];
#pragma unroll
  for (float& x : g) x = 0;
  products_begin(g);
  rows_by_columns<128>(g, own_values, state);
  products_end(g);
  sync_own();
  if (head + 1 < place.last) begin_state(head + 1);
  scale_rows(g, by);
  products_begin(g);
  registers_by_columns<128>(g, weights, other);
  products_end(g);
  rows_back(head, g);
}

// Sums over the chunk of what all lanes of a warp with the same r have, of neighbouring slots.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_alike(float* sums, int slot,
                                                                       float (&x)[8 / R]) {
  const float sum = shared_by_alike<R>(x);
  const int lane = thread & 31;
  sums[(slot + lane / (4 * R)) * Shared::lanes + thread / 32 * 4 * R + lane % (4 * R)] = sum;
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
