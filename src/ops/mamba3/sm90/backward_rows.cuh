// What: the second and the third warpgroup: rows of dq and dk, turned back, summed over the heads.
// Why: one text for both, so that both run through the same instructions.
// Never: sums over heads before the bias has had its share.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// dq = e^L (dO H) + W' K by one group, dk = e^(L_C - L) s (V E) + W'^T Q by another.
template <int R, int blocks, bool halves>
template <bool handed>
__device__ __forceinline__ void Backward<R, blocks, halves>::rows_of_group(int head) {
  const bool keys = group == 2;
  float g[64];
#pragma unroll
  for (float& x : g) x = 0;
  products_begin(g);
  rows_by_columns<128>(g, Operand(keys ? sh.v : sh.d_y), Operand(keys ? sh.e : sh.h));
  products_end(g);
  scale_rows(g, keys ? steps().key : steps().left);
  hopper::named_barrier_sync(weighed, back_threads);
  products_begin(g);
  if (keys)
    columns_by_columns<128>(g, Operand(sh.weights), Operand(sh.q));
  else
    rows_by_columns<128>(g, Operand(sh.weights), Operand(sh.k));
  products_end(g);
  hopper::named_barrier_sync(used, back_threads);
  rows_back<handed>(head, g);
}

// Their share of turns and decays; turned back, added to the sums over the heads.
template <int R, int blocks, bool halves>
template <bool handed>
__device__ __forceinline__ void Backward<R, blocks, halves>::rows_back(int head, float (&g)[64]) {
  const bool keys = group == 2;
  const char* const tile = keys ? sh.k : sh.q;
  float4* const sums = (keys ? sh.sums_k : sh.sums_q) + thread;
  float* const torques = keys ? sh.turn_k() : sh.turn_q();
  float* const dots = keys ? sh.dots_k : sh.dots_q;
  float* const by_bias = keys ? sh.rows_k : sh.rows_q;
  const bool wanted = keys ? a.grad.k_bias.data : a.grad.q_bias.data;
  const int row = own_row(), column = own_column(), r = row % R, lane = threadIdx.x & 31;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int own = row + 8 * second, t = own / R;
    const bool known = t < p.n;
    float dot = 0;
    // Numbers of the pair (x, w), whose gradients are (gx, gw); its torque.
    const auto one = [&](bool turns, const float2& by, float x, float w, float& gx, float& gw) {
      dot += x * gx + w * gw;
      if (!turns) return 0.0f;
      const float torque = x * gw - w * gx;
      const float cos = known ? by.x : 1.0f;
      float sin = known ? by.y : 0.0f;
      if (mutant(Mutant::m3_turned_back_forward)) sin = -sin;
      const float before = gx;
      gx = before * cos + gw * sin;
      gw = gw * cos - before * sin;
      return torque;
    };
    // Loads of eight words ahead of what is stored of them, behind which the compiler would leave
    // them.
    if constexpr (halves) {
#pragma unroll
      for (int from = 0; from < 8; from += 4) {
        uint32_t xs[4], ws[4];
        float2 by[8];
        float torque[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* at = tile + place_of(own, column + 8 * (from + i));
          xs[i] = *reinterpret_cast<const uint32_t*>(at);
          ws[i] = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
        }
        const bool turned = 8 * from < pairs;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          by[i] = {1, 0};
          if (turned) by[i] = sh.turns[t * Shared::apart + column + 8 * (from + i / 2) + i % 2];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = from + i;
          float* gx = g + 4 * j + 2 * second;
          float* gw = g + 4 * (j + 8) + 2 * second;
          torque[i] = one(turned, by[2 * i], low_of(xs[i]), low_of(ws[i]), gx[0], gw[0]);
          torque[4 + i] = one(turned, by[2 * i + 1], high_of(xs[i]), high_of(ws[i]), gx[1], gw[1]);
        }
        if (!turned) continue;
        if constexpr (R == 8) {
          // Each row of a token has one of the eight.
          torques[Shared::turn_at(t, column + 8 * (from + r % 4) + r / 4)] =
              shared_by_ranks<R>(torque);
        } else {
#pragma unroll
          for (int first = 0; first < 4; first += R) {
            float low[R], high[R];
#pragma unroll
            for (int k = 0; k < R; ++k) low[k] = torque[first + k], high[k] = torque[4 + first + k];
            const float x = shared_by_ranks<R>(low), w = shared_by_ranks<R>(high);
            *reinterpret_cast<float2*>(
                torques + Shared::turn_at(t, column + 8 * (from + first + r))) = {x, w};
          }
        }
      }
    } else {
#pragma unroll
      for (int from = 0; from < 16; from += 8) {
        uint32_t words[8];
        float2 by[8];
        float torque[8];
        const bool turned = 4 * from < pairs;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int j = from + i;
          words[i] = *reinterpret_cast<const uint32_t*>(tile + place_of(own, column + 8 * j));
          by[i] = {1, 0};
          if (turned) by[i] = sh.turns[t * Shared::apart + 4 * j + lane % 4];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float* gx = g + 4 * (from + i) + 2 * second;
          torque[i] = one(turned, by[i], low_of(words[i]), high_of(words[i]), gx[0], gx[1]);
        }
        if (!turned) continue;
#pragma unroll
        for (int first = 0; first < 8; first += R) {
          float of[R];
#pragma unroll
          for (int k = 0; k < R; ++k) of[k] = torque[first + k];
          torques[Shared::turn_at(t, 4 * (from + first + r) + lane % 4)] = shared_by_ranks<R>(of);
        }
      }
    }
    dot = over_quad(dot);
    if (lane % 4 == 0) dots[own] = dot;
  }
  if constexpr (handed)
    if (keys) add_last_key<R>(a, b, sh.unit, p, head, g);
#pragma unroll
  for (int from = 0; from < 16; from += 4) {
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = sums[(from + i) * 128];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const own = g + 4 * (from + i);
      x[i].x += own[0], x[i].y += own[1], x[i].z += own[2], x[i].w += own[3];
      sums[(from + i) * 128] = x[i];
    }
  }
  if (!wanted) return;
  constexpr int alike = Shared::alike;
#pragma unroll
  for (int slot = 0; slot < 32; slot += alike) {
    float x[alike];
#pragma unroll
    for (int i = 0; i < alike; ++i) {
      const int at = (slot + i) / 2 * 4 + (slot + i) % 2;
      x[i] = g[at] + g[at + 2];
      if (mutant(Mutant::m3_2_bias_after_group_sum)) {
        const float4 all = sums[at / 4 * 128];  // of the heads so far
        x[i] = at % 2 ? all.y + all.w : all.x + all.z;
      }
    }
    put_alike<R>(by_bias, slot, x);
  }
}

// Sums over the heads of the part: the gradient itself where it is the group's only one.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::store_rows(int part, const View& to,
                                                                        float* by_part,
                                                                        const float4* sums) {
  if (!to.data) return;
  const Unit& u = sh.unit;
  const int row = own_row(), r = row % R;
  const int64_t place0 = (place.sequence * wave.slice_chunks + place.in_slice) * int64_t{C};
  const bool whole = b.parts == 1;
  const bool pieces = to.dtype == DType::bf16 && to.stride[4] == 1;
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const int t = (row + 8 * (i & 1)) / R, c = own_column() + i / 2 * 8;
    if (t >= p.n) continue;
    const float2 x = reinterpret_cast<const float2*>(sums + i / 2 * 128 + thread)[i & 1];
    if (!whole) {
      const int64_t line =
          (((((place0 + t) * R + r) * a.size.groups + place.group) << cut.part_bits) + part) *
              b.parts +
          place.part;
      *reinterpret_cast<float2*>(by_part + line * columns + c) = x;
      continue;
    }
    const int column = cut.own_column(part, c);
    if (!cut.has(column)) continue;
    const int64_t at = cuda::at(to, u.batch, u.begin + p.first + t, r, place.group, column);
    auto* const own = static_cast<__nv_bfloat16*>(to.data) + at;
    if (pieces && reinterpret_cast<uintptr_t>(own) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(own) = two_rounded(x.x, x.y);
    } else {
      cuda::store(to, at, x.x);
      cuda::store(to, at + to.stride[4], x.y);
    }
  }
}

}  // namespace talea::mamba3::sm90
