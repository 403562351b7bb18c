// What: the rows of a chunk of a head as operands: copied ahead, turned, gated.
// Why: all warpgroups share it; what a head needs is under way while the head before ends.
// Never: stores a turned row.
#pragma once

#include "ops/mamba3/sm90/backward_units.cuh"

namespace talea::mamba3::sm90 {

// A state [P, N] of operands in memory, as a tile.
template <int threads>
__device__ __forceinline__ void copy_state(const void* from, char* tile, int thread) {
  const uint32_t to = hopper::smem_address(tile);
#pragma unroll
  for (int item = thread; item < columns * values / 8; item += threads)
    hopper::copy_16_bytes(to + static_cast<uint32_t>(place_of(item / 16, item % 16 * 8)),
                          static_cast<const __nv_bfloat16*>(from) + item * 8, true);
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ OfHeads Backward<R, blocks, halves>::of_heads(const void* buffer,
                                                                         int64_t each, int64_t at,
                                                                         int64_t bytes, int bits) {
  char* const from = static_cast<char*>(const_cast<void*>(buffer));
  return {from + ((number(0) >> bits) * each + at) * bytes, static_cast<uint32_t>(each * bytes)};
}

// A warp a tensor.
template <int R, int blocks, bool halves>
template <bool handed>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_homes() {
  if ((threadIdx.x & 31) != 0) return;
  const Unit& u = sh.unit;
  const int64_t token = u.begin + p.first;
  Homes& to = sh.homes;
  const auto columns_of = [&](const View& v) { return cuda::at(v, u.batch, token); };
  switch (threadIdx.x / 32) {
    case 0:
      to.q = cuda::at(a.q, u.batch, token, 0, u.group);
      break;
    case 1:
      to.k = cuda::at(a.k, u.batch, token, 0, u.group);
      break;
    case 2:
      to.v = columns_of(a.v);
      break;
    case 3:
      to.z = columns_of(a.z);
      break;
    case 4:
      to.d_out = columns_of(a.d_out);
      break;
    case 5:
      to.angles = columns_of(a.angles);
      break;
    case 6:
      to.d_v = columns_of(a.grad.v);
      break;
    case 7:
      to.d_z = columns_of(a.grad.z);
      break;
    case 8:
      to.d_angles = columns_of(a.grad.angles);
      break;
    case 9:
      sh.from.h = of_heads(b.inner, states_of_head<handed>(a), state_of_chunk<handed>(a, b, place),
                           size * 2);
      break;
    case 10:
      sh.from.e = of_heads(b.inner_upstream, wave.slice_chunks, place.in_slice, size * 2);
      break;
    case 11:
      sh.from.turns =
          of_heads(b.token_turns, a.size.segment, place.in_segment, C * pairs * 8, cut.slab_bits);
      break;
    case 12:
      sh.from.steps = of_heads(b.token_steps, a.size.segment, place.in_segment,
                               cuda::chunk_step_bytes(C), cut.slab_bits);
      break;
    case 13:
      sh.from.partial = of_heads(b.partial, wave.slice_chunks, place.in_slice,
                                 int64_t{cuda::parameter_count(a.size)} * 4);
      break;
  }
}

// E, and rows of q and k, each by the group that is the last to read those of the head before.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin_rows(int head) {
  if (group == 0)
    copy_state<128>(sh.from.e.of(head), sh.e, thread);
  else if (group == 1)
    copy_rows<R, 128>(a.q, cut, cut.part_of(head), sh.homes.q, p.n, sh.q, thread);
  else if (group == 2)
    copy_rows<R, 128>(a.k, cut, cut.part_of(head), sh.homes.k, p.n, sh.k, thread);
}
// All else that a head needs but h is under way.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin(int head) {
  const int64_t v = home(sh.homes.v, a.v, head);
  if constexpr (R == 1) copy_values<back_threads>(a, v, p, sh.v, threadIdx.x);
  constexpr int count = R * (2 * columns + 3 * values) + 4;
  copy_bytes<count * 4, back_threads>(b.head_parameters + head * int64_t{count}, sh.q_bias,
                                      threadIdx.x);
  copy_turns(head);
  copies_commit();
  next.own.load(a, v, p);
  next.gated.load(a, up, d_out_home(head), home(sh.homes.z, a.z, head), p, threadIdx.x);
  const auto* behind =
      reinterpret_cast<const __nv_bfloat16*>(sh.from.h.of(head)) + size + threadIdx.x / 8 * columns;
  const int j = threadIdx.x & 7;
  next.behind[0] = __ldg(reinterpret_cast<const uint4*>(behind + (halves ? 8 * j : 16 * j)));
  next.behind[1] =
      __ldg(reinterpret_cast<const uint4*>(behind + (halves ? 64 + 8 * j : 16 * j + 8)));
}
// Cosines and sines of the tokens, a row a token.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::copy_turns(int head) {
  const char* const from = sh.from.turns.of(head >> cut.slab_bits);
  const uint32_t to = hopper::smem_address(sh.turns);
#pragma unroll
  for (int i = 0; i < (C * pairs / 2 + back_threads - 1) / back_threads; ++i) {
    const int item = threadIdx.x + i * back_threads, t = item / (pairs / 2);
    if (C * pairs / 2 % back_threads != 0 && item >= C * pairs / 2) break;
    hopper::copy_16_bytes(
        to + static_cast<uint32_t>(t * (Shared::apart * 8) + item % (pairs / 2) * 16),
        from + item * 16, true);
  }
}
// Steps, and h, whose place sums of turns have had.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin_state(int head) {
  copy_state<back_threads>(sh.from.h.of(head), sh.h, threadIdx.x);
  copy_bytes<sizeof(ChunkSteps<C>), back_threads>(sh.from.steps.of(head >> cut.slab_bits),
                                                  &sh.steps[stage_of(head)], threadIdx.x);
  copies_commit();
}

template <int R, int blocks, bool halves>
template <bool units>
__device__ __forceinline__ void Backward<R, blocks, halves>::prepare(int head) {
  copies_done_but_one();
  __syncthreads();
  anchor();
  turn_rows();
  next.own.put(p, sh.mimo_v, nullptr, sh.v, nullptr);
  const int row = threadIdx.x / 8, c = (threadIdx.x & 7) * 8;
  const auto put = [&](auto before) {
    *reinterpret_cast<uint4*>(sh.d_y + place_of(row, c)) = next.gated.gated(
        a, up, p, threadIdx.x, sh.mimo_z, sh.mimo_out, 1.0f, [&] { return d_out_home(head); },
        before);
  };
  if constexpr (units) {
    float own = 0;
    put([&](const float(&d_y)[8]) { own = d_d_of(head, d_y); });
    put_d_d(own);
  } else {
    put([](const float(&)[8]) {});
  }
  copies_done();
  hopper::fence_async_shared();
  __syncthreads();
}

// <Hout, E>, and torque(Hout, E) of each pair: a thread has 16 columns of a row of P.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::anchor() {
  const int row = threadIdx.x / 8, j = threadIdx.x & 7, lane = threadIdx.x & 31;
  const int warp = threadIdx.x / 32;
  float work = 0;
  float torque[8];
  uint4 e[2];
  e[0] = *reinterpret_cast<const uint4*>(sh.e + place_of(row, halves ? 8 * j : 16 * j));
  e[1] = *reinterpret_cast<const uint4*>(sh.e + place_of(row, halves ? 64 + 8 * j : 16 * j + 8));
  const uint32_t es[8] = {e[0].x, e[0].y, e[0].z, e[0].w, e[1].x, e[1].y, e[1].z, e[1].w};
  const uint4 x0 = next.behind[0], x1 = next.behind[1];
  const uint32_t hs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    work += low_of(hs[i]) * low_of(es[i]) + high_of(hs[i]) * high_of(es[i]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (halves) {
      const auto of = [&](uint32_t both) { return i & 1 ? high_of(both) : low_of(both); };
      torque[i] = of(hs[i / 2]) * of(es[4 + i / 2]) - of(hs[4 + i / 2]) * of(es[i / 2]);
    } else {
      torque[i] = low_of(hs[i]) * high_of(es[i]) - high_of(hs[i]) * low_of(es[i]);
    }
  }
  double sum = static_cast<double>(over_warp(work));
  if (lane == 0) sh.energy[warp] = sum;
  // Over the four rows of a warp.
  share<4>(torque, 16), share<2>(torque, 8);
  if (8 * j < pairs)
    *reinterpret_cast<float2*>(sh.torque[warp] + 8 * j + lane / 16 * 4 + lane / 8 % 2 * 2) = {
        torque[0], torque[1]};
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::turn_rows() {
  const int pp = threadIdx.x & 31, row0 = threadIdx.x / 32, r = row0 % R;
  const float4 q_bias = sh.q_bias[r * 32 + pp], k_bias = sh.k_bias[r * 32 + pp];
  const float4 bias[4] = {q_bias, k_bias, q_bias, k_bias};
#pragma unroll
  for (int first = row0; first < rows; first += 32) {
    TwoTurns by[4];
    char* at[4];
    bool live[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i / 2 * 16, t = row / R;
      if (2 * pp < pairs) {
        const float4 x = *reinterpret_cast<const float4*>(sh.turns + t * Shared::apart + 2 * pp);
        by[i] = {x.x, x.y, x.z, x.w};
      }
      at[i] = words_at<halves>(i & 1 ? sh.k : sh.q, row, pp);
      live[i] = t < p.n;
    }
    turn_all<halves, true>(at, live, bias, by);
  }
}

}  // namespace talea::mamba3::sm90
