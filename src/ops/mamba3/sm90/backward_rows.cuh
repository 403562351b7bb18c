// What: rows of dq and dk: their share of turns; turned back, added to the sums over the heads.
// Why: one text for both, so that both run through the same instructions.
// Never: sums over heads before the bias has had its share, or adds to what another thread adds to.
#pragma once

#include "ops/mamba3/sm90/backward_gates.cuh"

namespace talea::mamba3::sm90 {

// The sums lie in memory: a thread's own, which it adds to in the order of the heads.
__device__ __forceinline__ void add_two(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y)
               : "memory");
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::rows_back(int head, float (&g)[64]) {
  const char* const tile = of_keys ? sh.k : sh.q;
  float* const torques = sh.of_group[of_keys ? 1 : 0].torques;
  const int row = own_row(), column = own_column(), r = row % R, lane = thread & 31;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int own_row = row + 8 * second, t = own_row / R;
    // Numbers of the pair (x, w), whose gradients are (gx, gw); its torque.
    const auto one = [](float cos, float sin, float x, float w, float& gx, float& gw) {
      const float torque = x * gw - w * gx, before = gx;
      gx = before * cos + gw * sin;
      gw = gw * cos - before * sin;
      return torque;
    };
    // Loads of some words ahead of what is stored of them, behind which the compiler would leave
    // them. Turns are zeros behind the last token.
    if constexpr (halves) {
#pragma unroll
      for (int from = 0; from < 4 * blocks; from += 4) {
        uint32_t xs[4], ws[4];
        float4 by[4];
        float torque[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = column + 8 * (from + i);
          const char* const at = tile + place_of(own_row, c);
          xs[i] = *reinterpret_cast<const uint32_t*>(at);
          ws[i] = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
          by[i] = *reinterpret_cast<const float4*>(sh.turns + Shared::turn_at(t, c));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = from + i;
          float* const gx = g + 4 * j + 2 * second;
          float* const gw = g + 4 * (j + 8) + 2 * second;
          torque[i] = one(by[i].x, by[i].y, low_of(xs[i]), low_of(ws[i]), gx[0], gw[0]);
          torque[4 + i] = one(by[i].z, by[i].w, high_of(xs[i]), high_of(ws[i]), gx[1], gw[1]);
        }
#pragma unroll
        for (int first = 0; first < 4; first += R) {
          float low[R], high[R];
#pragma unroll
          for (int k = 0; k < R; ++k) low[k] = torque[first + k], high[k] = torque[4 + first + k];
          const float x = shared_by_ranks<R>(low), w = shared_by_ranks<R>(high);
          *reinterpret_cast<float2*>(torques +
                                     Shared::turn_at(t, column + 8 * (from + first + r))) = {x, w};
        }
      }
    } else {
#pragma unroll
      for (int from = 0; from < 8 * blocks; from += 8) {
        uint32_t words[8];
        float2 by[8];
        float torque[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int j = from + i;
          words[i] = *reinterpret_cast<const uint32_t*>(tile + place_of(own_row, column + 8 * j));
          by[i] = sh.turns[Shared::turn_at(t, 4 * j + lane % 4)];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float* const gx = g + 4 * (from + i) + 2 * second;
          torque[i] = one(by[i].x, by[i].y, low_of(words[i]), high_of(words[i]), gx[0], gx[1]);
        }
#pragma unroll
        for (int first = 0; first < 8; first += R) {
          float of[R];
#pragma unroll
          for (int k = 0; k < R; ++k) of[k] = torque[first + k];
          torques[Shared::turn_at(t, 4 * (from + first + r) + lane % 4)] = shared_by_ranks<R>(of);
        }
      }
    }
    float* const sums = of_keys ? sh.sums_k : sh.sums_q;
    if (sums && t < p.n) {
      float* const to = sums + own_row * (int64_t{a.size.groups} * b.parts * columns) + column;
      if (head == place.first) {
#pragma unroll
        for (int j = 0; j < 16; ++j)
          *reinterpret_cast<float2*>(to + 8 * j) = {g[4 * j + 2 * second],
                                                    g[4 * j + 2 * second + 1]};
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j)
          add_two(to + 8 * j, g[4 * j + 2 * second], g[4 * j + 2 * second + 1]);
      }
    }
  }
  // Where the other group's values lay.
  hopper::named_barrier_sync(of_keys ? queries_through : keys_through, 256);
  if (of_keys ? !a.grad.k_bias.data : !a.grad.q_bias.data) return;
  float* const by_bias = reinterpret_cast<float*>(of_keys ? sh.v : sh.d_y);
  constexpr int alike = Shared::alike;
#pragma unroll
  for (int slot = 0; slot < 32; slot += alike) {
    float x[alike];
#pragma unroll
    for (int i = 0; i < alike; ++i) {
      const int at = (slot + i) / 2 * 4 + (slot + i) % 2;
      x[i] = g[at] + g[at + 2];
    }
    put_alike(by_bias, slot, x);
  }
}

}  // namespace talea::mamba3::sm90
