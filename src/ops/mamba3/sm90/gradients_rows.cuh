// What: what both warpgroups that multiply do alike: pairs weighed in registers, rows turned back.
// Why: the same pairs, once by rows and once by columns, cost less than handing them over.
// Never: multiplies what a query does not see, or sums over heads before the bias has had its share.
#pragma once

#include "ops/mamba3/sm90/gradients.cuh"

namespace talea::mamba3::sm90 {

// Pairs weighed, a row of the accumulator a query or a key; `left`: what the rows have of pairs of
// one token (queries), or of later ones (keys).
template <int R, int blocks, bool halves>
template <bool of_keys>
__device__ __forceinline__ void Gradients<R, blocks, halves>::weigh(
    int head, const float (&scores)[32], const float (&products)[32], uint32_t (&seen)[4][4],
    uint32_t (&weights)[4][4], float (&left)[2], float& trace) {
  const auto& of = steps(head);
  const int row = own_row(), column = own_column(), warp = thread / 32;
  const int t[2] = {row / R, (row + 8) / R};
  const float4 own[2] = {of.pair[t[0]], of.pair[t[1]]};
  left[0] = left[1] = trace = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float x[2][2] = {{0, 0}, {0, 0}}, w[2][2] = {{0, 0}, {0, 0}};
    // Nothing of later keys; of a warp's own sixteen rows some are.
    const bool some = of_keys ? j >= 2 * warp : j <= 2 * warp + 1;
    const bool whole = of_keys ? j > 2 * warp + 1 : j < 2 * warp;
    if (some) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float decay = 0, by = 0;
        bool later = false, sees = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = column + 8 * j + i, other = at / R;
          if (R == 1 || i == 0) {  // else neighbours are of one token
            const float4 far = of.pair[other];
            const float4& query = of_keys ? far : own[second];
            const float4& key = of_keys ? own[second] : far;
            const int query_token = of_keys ? other : t[second];
            const int key_token = of_keys ? t[second] : other;
            // Of later keys it may be infinite: chosen, not multiplied.
            decay = decay_of(query, key);
            later = whole || query_token > key_token;
            sees = whole || query_token >= key_token;
            by = later ? key.z * decay : key.w;
          }
          const float score = scores[4 * j + 2 * second + i];
          const float product = products[4 * j + 2 * second + i];
          x[second][i] = sees ? by * score : 0.0f;
          w[second][i] = sees ? by * product : 0.0f;
          if (of_keys) {
            left[second] += sees && later ? decay * (product * score) : 0.0f;
          } else if (!whole) {
            left[second] += sees && !later ? product * score : 0.0f;
            trace += sees && row + 8 * second == at ? product : 0.0f;
          }
        }
      }
    }
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      seen[j / 2][(j & 1) * 2 + second] = two_rounded(x[second][0], x[second][1]);
      weights[j / 2][(j & 1) * 2 + second] = two_rounded(w[second][0], w[second][1]);
    }
  }
}

// Their share of turns and decays; turned back, added to the sums over the heads.
template <int R, int blocks, bool halves>
template <bool of_keys>
__device__ __forceinline__ void Gradients<R, blocks, halves>::rows_back(int head, float (&g)[64],
                                                                        float (&sums)[64]) {
  const auto& operands = sh.operands[stage(head)];
  const char* const tile = of_keys ? operands.k : operands.q;
  const float2* const turns = sh.turns[stage(head)];
  float* const torques = of_keys ? sh.turn_k : sh.turn_q;
  float* const dots = of_keys ? sh.dots_k : sh.dots_q;
  const int row = own_row(), column = own_column(), r = row % R, lane = thread & 31;
  if (head > place.first) hopper::named_barrier_sync(heard, gradient_threads);
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int own = row + 8 * second, t = own / R;
    const bool known = t < n;
    float dot = 0;
    // Numbers of the pair (x, w), whose gradients are (gx, gw); its torque.
    const auto one = [&](int pair, bool turned, float x, float w, float& gx, float& gw) {
      dot += x * gx + w * gw;
      if (!turned) return 0.0f;
      const float torque = x * gw - w * gx;
      const float2 by = turns[Shared::turn_at(t, pair)];
      const float cos = known ? by.x : 1.0f, sin = known ? by.y : 0.0f;
      const float before = gx;
      gx = before * cos + gw * sin;
      gw = gw * cos - before * sin;
      return torque;
    };
    if constexpr (halves) {
#pragma unroll
      for (int first = 0; first < 8; first += R) {
        float low[R], high[R];
#pragma unroll
        for (int k = 0; k < R; ++k) {
          const int j = first + k, pair = column + 8 * j;
          const char* at = tile + place_of(own, column + 8 * j);
          const uint32_t x = *reinterpret_cast<const uint32_t*>(at);
          const uint32_t w = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
          float* gx = g + 4 * j + 2 * second;
          float* gw = g + 4 * (j + 8) + 2 * second;
          low[k] = one(pair, 8 * j < pairs, low_of(x), low_of(w), gx[0], gw[0]);
          high[k] = one(pair + 1, 8 * j < pairs, high_of(x), high_of(w), gx[1], gw[1]);
        }
        if (8 * first >= pairs) continue;
        const float x = shared_by_ranks<R>(low), w = shared_by_ranks<R>(high);
        *reinterpret_cast<float2*>(torques + Shared::turn_at(t, column + 8 * (first + r))) = {x, w};
      }
    } else {
#pragma unroll
      for (int first = 0; first < 16; first += R) {
        float torque[R];
#pragma unroll
        for (int k = 0; k < R; ++k) {
          const int j = first + k;
          const uint32_t both =
              *reinterpret_cast<const uint32_t*>(tile + place_of(own, column + 8 * j));
          float* gx = g + 4 * j + 2 * second;
          torque[k] =
              one(4 * j + lane % 4, 4 * j < pairs, low_of(both), high_of(both), gx[0], gx[1]);
        }
        if (4 * first >= pairs) continue;
        torques[Shared::turn_at(t, 4 * (first + r) + lane % 4)] = shared_by_ranks<R>(torque);
      }
    }
    dot = over_quad(dot);
    if (lane % 4 == 0) dots[own] = dot;
  }
  // Nothing of the head's operands is read from here on.
  hopper::named_barrier_arrive(done, gradient_threads);
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] += g[i];
  constexpr int alike = Shared::alike;
  float* const alike_to = of_keys ? sh.sums_k : sh.sums_q;
  float* const to =
      reinterpret_cast<float*>(sh.from.partial.of(head)) + (of_keys ? R * columns : 0);
  if (of_keys ? !a.grad.k_bias.data : !a.grad.q_bias.data) {
    for (int i = thread; i < R * columns; i += 128) to[i] = 0;
    return;
  }
  // The place of the sums before is free.
  hopper::named_barrier_sync(of_keys ? keys : queries, 128);
#pragma unroll
  for (int slot = 0; slot < 32; slot += alike) {
    float x[alike];
#pragma unroll
    for (int i = 0; i < alike; ++i) {
      const int at = (slot + i) / 2 * 4 + (slot + i) % 2;
      x[i] = g[at] + g[at + 2];
    }
    put_alike(alike_to, slot, x);
  }
  hopper::named_barrier_sync(of_keys ? keys : queries, 128);
  store_alike(alike_to, R * columns, columns, to);
}

// Sums over the heads of the part: the gradient itself where it is the group's only one.
template <int R, int blocks, bool halves>
template <bool of_keys>
__device__ __forceinline__ void Gradients<R, blocks, halves>::store_rows(const float (&sums)[64]) {
  const View& to = of_keys ? a.grad.k : a.grad.q;
  float* const by_part = of_keys ? b.dk : b.dq;
  if (!to.data) return;
  const Unit& u = sh.unit;
  const int row = own_row(), r = row % R;
  const int64_t place0 = (place.sequence * wave.slice_chunks + place.in_slice) * int64_t{C};
  const bool whole = b.parts == 1;
  const bool pieces = to.dtype == DType::bf16 && to.stride[4] == 1;
  if (!whole) {
    const int64_t line = ((place0 * R + row) * a.size.groups + place.group) * b.parts + place.part;
    const int64_t apart = int64_t{8} * a.size.groups * b.parts * columns;
    float* const own = by_part + line * columns + own_column();
#pragma unroll
    for (int second = 0; second < 2; ++second)
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if ((row + 8 * second) / R < n)
          *reinterpret_cast<float2*>(own + second * apart + 8 * j) = {sums[4 * j + 2 * second],
                                                                      sums[4 * j + 2 * second + 1]};
    return;
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int t = (row + 8 * second) / R;
    if (t >= n) continue;
    const int64_t at = cuda::at(to, u.batch, u.begin + sh.part.first + t, r, place.group);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int c = own_column() + j * 8;
      const float x = sums[4 * j + 2 * second], w = sums[4 * j + 2 * second + 1];
      auto* const own = static_cast<__nv_bfloat16*>(to.data) + at + c;
      if (pieces && reinterpret_cast<uintptr_t>(own) % 4 == 0) {
        *reinterpret_cast<uint32_t*>(own) = two_rounded(x, w);
      } else {
        cuda::store(to, at + c * to.stride[4], x);
        cuda::store(to, at + (c + 1) * to.stride[4], w);
      }
    }
  }
}

}  // namespace talea::mamba3::sm90
