// What: the fourth warpgroup: dv, and E from chunk to chunk in fp32.
// Why: decays and angles are anchored where E is handed on.
// Never: divides by a decay.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// f(slot, pair, first, second number) of each pair of an accumulator's row (0 or 1), as indices.
template <int R, int blocks>
template <bool halves, class F>
__device__ __forceinline__ void Backward<R, blocks>::each_pair(F f) {
  const int lane = threadIdx.x & 3;
  if constexpr (halves) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) f(2 * j + i, 8 * j + 2 * lane + i, 4 * j + i, 4 * (j + 8) + i);
  } else {
#pragma unroll
    for (int j = 0; j < 16; ++j) f(j, 4 * j + lane, 4 * j, 4 * j + 1);
  }
}

// E in fp32, from chunk to chunk.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::take_own(float (&e)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float2 both = sh.state[i * 128 + thread];
    e[2 * i] = both.x, e[2 * i + 1] = both.y;
  }
}

// E behind chunk `next` - 1, whose state behind is in sh.h: <Hout, E>, torque(Hout, E) of each
// pair, and E for the products.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::hand_on(int64_t next, float (&e)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sh.state[i * 128 + thread] = {e[2 * i], e[2 * i + 1]};
  const int which = static_cast<int>(next - 1) & 1;
  if (a.size.halves)
    anchor_of<true>(which, e);
  else
    anchor_of<false>(which, e);
  put_tile(sh.e, e);
}

template <int R, int blocks>
template <bool halves>
__device__ __forceinline__ void Backward<R, blocks>::anchor_of(int which, float (&e)[64]) {
  const char* const behind = sh.h;
  const int row = own_row(), column = own_column(), lane = threadIdx.x & 31;
  float work = 0, torque[16];
#pragma unroll
  for (float& x : torque) x = 0;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    if constexpr (halves) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const char* at = behind + place_of(row + 8 * second, column + 8 * j);
        const uint32_t hu = *reinterpret_cast<const uint32_t*>(at);
        const uint32_t hw = *reinterpret_cast<const uint32_t*>(at + panel_bytes);
        const float* eu = e + 4 * j + 2 * second;
        const float* ew = e + 4 * (j + 8) + 2 * second;
        work += low_of(hu) * eu[0] + high_of(hu) * eu[1] + low_of(hw) * ew[0] + high_of(hw) * ew[1];
        torque[2 * j] += low_of(hu) * ew[0] - low_of(hw) * eu[0];
        torque[2 * j + 1] += high_of(hu) * ew[1] - high_of(hw) * eu[1];
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint32_t h =
            *reinterpret_cast<const uint32_t*>(behind + place_of(row + 8 * second, column + 8 * j));
        const float* own = e + 4 * j + 2 * second;
        work += low_of(h) * own[0] + high_of(h) * own[1];
        torque[j] += low_of(h) * own[1] - high_of(h) * own[0];
      }
    }
  }
  double sum = static_cast<double>(work);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) sh.energy[which][thread / 32] = sum;
  each_pair<halves>([&](int slot, int pair, int, int) {
    const float all = over_eight(torque[slot]);
    if (lane < 4) sh.torque[which][thread / 32][pair] = all;
  });
}

// E before the chunk.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::state_back(int64_t chunk) {
  float e[64];
  take_own(e);
  const float whole = sh.steps.whole;
  scale_state(e, whole);
  products_begin(e);
  columns_by_columns<128>(e, Operand(sh.scaled), Operand(sh.q));
  products_end(e);
  hand_on(chunk, e);
}

// dv = e^(L_C - L) s (K E^T) + seen^T dO + d dO; then E before the chunk.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::state_and_values(int64_t chunk) {
  float dv[32];
  const int row = own_row(), column = own_column(), r = row % R, lane = threadIdx.x & 31;
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
    if (lane % 4 == 0) sh.by_state[row + 8 * second] = sh.more.right[(row + 8 * second) / R] * all;
  }
  scale_rows(dv, sh.steps.key);
  hopper::named_barrier_sync(upstream_read, 256);
  state_back(chunk);
  hopper::named_barrier_sync(weighed, back_threads);
  products_begin(dv);
  columns_by_columns<64>(dv, Operand(sh.seen), Operand(sh.d_y));
  products_end(dv);
  const int64_t token = u.begin + p.first;
  const int64_t dv0 = cuda::at(a.grad.v, u.batch, token, u.head) + column;
  const int64_t v0 = cuda::at(a.v, u.batch, token, u.head) + column;
  const int t[2] = {row / R, (row + 8) / R};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int c = column + 8 * j;
    const float2 by = *reinterpret_cast<const float2*>(sh.mimo_v + r * values + c);
    float to[2] = {0, 0};
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      float x = dv[4 * j + 2 * second], y = dv[4 * j + 2 * second + 1];
      if (skip != 0) {
        const uint32_t up_here =
            *reinterpret_cast<const uint32_t*>(sh.d_y + place_of(row + 8 * second, c));
        x += skip * low_of(up_here), y += skip * high_of(up_here);
      }
      if (a.grad.mimo_v.data && t[second] < p.n) {
        const uint32_t v = __ldg(reinterpret_cast<const uint32_t*>(
            static_cast<const __nv_bfloat16*>(a.v.data) + v0 + t[second] * a.v.stride[1] + 8 * j));
        to[0] += x * low_of(v), to[1] += y * high_of(v);
      }
      if (a.grad.v.data) {
        x = over_ranks<R>(x * by.x), y = over_ranks<R>(y * by.y);
        if (t[second] < p.n && j % R == r)
          store_two(a.grad.v, dv0 + t[second] * a.grad.v.stride[1] + 8 * j, x, y);
      }
    }
    if (a.grad.mimo_v.data) {
      add_alike(sh.by_v, 2 * j, to[0]);
      add_alike(sh.by_v, 2 * j + 1, to[1]);
    }
  }
}

}  // namespace talea::mamba3::sm90
