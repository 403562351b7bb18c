// What: the rows of a chunk of a head as operands: copied ahead, turned, gated.
// Why: all warpgroups share it; what a head needs is under way while the head before ends.
// Never: stores a turned row.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

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

__device__ __forceinline__ float number_or(float neutral, const View& v, uint32_t bits) {
  return v.data ? cuda::number_of(v.dtype, bits) : neutral;
}

// A warp a tensor.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_homes(int head) {
  if ((threadIdx.x & 31) != 0) return;
  const Unit u = cuda::unit_of(a, wave.first + place.sequence, head);
  const int64_t token = u.begin + p.first;
  Homes& to = sh.homes[head & 1];
  const auto values_of = [&](const View& v) { return cuda::at(v, u.batch, token, 0, u.head); };
  const auto columns_of = [&](const View& v) { return cuda::at(v, u.batch, token, u.head); };
  switch (threadIdx.x / 32) {
    case 0:
      sh.units[head & 1] = u;
      break;
    case 1:
      to.q = cuda::at(a.q, u.batch, token, 0, u.group);
      break;
    case 2:
      to.k = cuda::at(a.k, u.batch, token, 0, u.group);
      break;
    case 3:
      to.v = columns_of(a.v);
      break;
    case 4:
      to.z = columns_of(a.z);
      break;
    case 5:
      to.d_out = values_of(a.d_out);
      break;
    case 6:
      to.angles = columns_of(a.angles);
      break;
    case 7:
      to.d_v = columns_of(a.grad.v);
      break;
    case 8:
      to.d_z = columns_of(a.grad.z);
      break;
    case 9:
      to.d_angles = columns_of(a.grad.angles);
      break;
    case 10:
      to.q_bias = cuda::at(a.q_bias, u.head);
      break;
    case 11:
      to.k_bias = cuda::at(a.k_bias, u.head);
      break;
    case 12:
      to.mimo_v = cuda::at(a.mimo_v, u.head);
      break;
    case 13:
      to.mimo_z = cuda::at(a.mimo_z, u.head);
      break;
    case 14:
      to.mimo_out = cuda::at(a.mimo_out, u.head);
      break;
    case 15:
      to.skip = cuda::read_or(0, a.d, cuda::at(a.d, u.head));
      break;
  }
}

// E, and rows of q and k, each by the group that is the last to read those of the head before.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin_rows(int head) {
  const int64_t in_slice = number(head) * wave.slice_chunks + place.in_slice;
  if (group == 0)
    copy_state<128>(
        static_cast<const __nv_bfloat16*>(b.inner_upstream) + in_slice * (columns * values), sh.e,
        thread);
  else if (group == 1)
    copy_rows<R, 128>(a.q, homes(head).q, p, sh.q, thread);
  else if (group == 2)
    copy_rows<R, 128>(a.k, homes(head).k, p, sh.k, thread);
}
// All else that a head needs but h is under way.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin(int head) {
  const Unit& u = unit(head);
  const Homes& home = homes(head);
  const int64_t J = a.size.segment, at = number(head) * J + place.in_segment;
  if constexpr (R == 1) copy_values<back_threads>(a, home.v, p, sh.v, threadIdx.x);
  copies_commit();
  next.raw = static_cast<int>(threadIdx.x) <= C ? raw_token(a, u, p, threadIdx.x) : RawToken{};
  next.own.load(a, home.v, p);
  next.gated.load(a, home.d_out, home.z, p, threadIdx.x);
  const int A = a.size.pairs;
#pragma unroll
  for (int i = 0; i < Ahead<R, blocks>::angle_items; ++i) {
    const int item = threadIdx.x + i * back_threads, t = item / (pairs / 2);
    const int pp = item % (pairs / 2);
    next.angles[i] = {0, 0};
    if (a.angles.data && t < p.n && 2 * pp < A)
      next.angles[i] =
          __ldg(reinterpret_cast<const uint2*>(b.token_angles + (at * C + t) * A + 2 * pp));
  }
  const auto* behind = static_cast<const __nv_bfloat16*>(b.inner) +
                       (number(head) * (J + 1) + place.in_segment + 1) * (columns * values) +
                       threadIdx.x / 8 * columns;
  const int j = threadIdx.x & 7;
  next.behind[0] = __ldg(reinterpret_cast<const uint4*>(behind + (halves ? 8 * j : 16 * j)));
  next.behind[1] =
      __ldg(reinterpret_cast<const uint4*>(behind + (halves ? 64 + 8 * j : 16 * j + 8)));
  const int i = threadIdx.x, r = i / columns, c = i % columns;
  next.q_bias = next.k_bias = next.mimo_v = next.mimo_z = next.mimo_out = 0;
  const auto bits = [](const View& v, int64_t from, int r, int c) {
    return v.data ? cuda::bits_at(v, from + r * v.stride[1] + c * v.stride[2]) : 0u;
  };
  if (i < R * columns) {
    next.q_bias = bits(a.q_bias, home.q_bias, r, c);
    next.k_bias = bits(a.k_bias, home.k_bias, r, c);
  }
  if (i < R * values) {
    const int rv = i / values, cv = i % values;
    next.mimo_v = bits(a.mimo_v, home.mimo_v, rv, cv);
    next.mimo_z = bits(a.mimo_z, home.mimo_z, rv, cv);
    next.mimo_out = bits(a.mimo_out, home.mimo_out, rv, cv);
  }
}
// h, whose place sums of turns have had.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin_state(int head) {
  copy_state<back_threads>(
      static_cast<const __nv_bfloat16*>(b.inner) +
          (number(head) * (a.size.segment + 1) + place.in_segment) * (columns * values),
      sh.h, threadIdx.x);
  copies_commit();
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::prepare(int head) {
  sh.raw.put(threadIdx.x, next.raw);
  put_parameters();
  if (head + 1 < place.last) put_homes(head + 1);
  copies_done_but_one();
  __syncthreads();
  if (threadIdx.x < 32)
    read_steps(sh.raw, p, sh.steps, [&](int t, float right, float lambda, float other) {
      sh.more.right[t] = right, sh.more.lambda[t] = lambda, sh.more.other[t] = other;
    });
  read_angles();
  anchor();
  __syncthreads();
  turn_rows();
  next.own.put(p, sh.mimo_v, nullptr, sh.v, nullptr);
  const int row = threadIdx.x / 8, r = row % R, c = (threadIdx.x & 7) * 8;
  *reinterpret_cast<uint4*>(sh.d_y + place_of(row, c)) =
      next.gated.gated(a, p, threadIdx.x, sh.mimo_z + r * values + c, sh.mimo_out + r * values + c,
                       1.0f, [&] { return homes(head).d_out; });
  copies_done();
  hopper::fence_async_shared();
  __syncthreads();
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_parameters() {
  const int i = threadIdx.x, r = i / columns, c = i % columns;
  if (i < R * columns) {
    const int word = halves ? c % 64 / 2 : c / 4;
    const int in_word = halves ? (c & 1) + c / 64 * 2 : c & 3;
    reinterpret_cast<float*>(sh.q_bias + r * 32 + word)[in_word] =
        number_or(0, a.q_bias, next.q_bias);
    reinterpret_cast<float*>(sh.k_bias + r * 32 + word)[in_word] =
        number_or(0, a.k_bias, next.k_bias);
  }
  if (i < R * values) {
    sh.mimo_v[i] = number_or(1, a.mimo_v, next.mimo_v);
    sh.mimo_z[i] = number_or(1, a.mimo_z, next.mimo_z);
    sh.mimo_out[i] = number_or(1, a.mimo_out, next.mimo_out);
  }
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::read_angles() {
#pragma unroll
  for (int i = 0; i < Ahead<R, blocks>::angle_items; ++i) {
    const int item = threadIdx.x + i * back_threads, t = item / (pairs / 2);
    const int pp = item % (pairs / 2);
    if (t >= p.n) break;
    float4 by;
    sine_cosine_of(next.angles[i].x, by.y, by.x);
    sine_cosine_of(next.angles[i].y, by.w, by.z);
    *reinterpret_cast<float4*>(sh.turns + t * Shared::apart + 2 * pp) = by;
  }
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
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    torque[i] += __shfl_xor_sync(0xffffffffu, torque[i], 8);
    torque[i] += __shfl_xor_sync(0xffffffffu, torque[i], 16);
  }
  if (lane < 8 && 8 * j < pairs) {
    float4* const to = reinterpret_cast<float4*>(sh.torque[warp] + 8 * j);
    to[0] = {torque[0], torque[1], torque[2], torque[3]};
    to[1] = {torque[4], torque[5], torque[6], torque[7]};
  }
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::turn_rows() {
  const int pp = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < rows / 16; ++i) {
    const int row = threadIdx.x / 32 + 16 * i, t = row / R, r = row % R;
    if (t >= p.n) continue;
    TwoTurns by;
    if (2 * pp < pairs) {
      const float4 x = *reinterpret_cast<const float4*>(sh.turns + t * Shared::apart + 2 * pp);
      by.cos0 = x.x, by.sin0 = x.y, by.cos1 = x.z, by.sin1 = x.w;
    }
    turn_row<halves>(sh.q, row, pp, sh.q_bias[r * 32 + pp], by);
    turn_row<halves>(sh.k, row, pp, sh.k_bias[r * 32 + pp], by);
  }
}

}  // namespace talea::mamba3::sm90
