// What: gradients of steps, angles and decays of the tokens of a chunk, and of the head's parameters.
// Why: they are sums of what the groups left behind, in fixed order.
// Never: sums with atomics.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::tokens(int head) {
  angles_back(head);
  if (threadIdx.x >= back_threads - 32 && a.grad.adt.data) decays_back(head);
  parameters_back(head);
}

// A thread has a pair of a few tokens.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::read_rates(int head) {
  const int i = threadIdx.x % pairs, first = threadIdx.x / pairs * angle_tokens;
  const bool turns = a.angles.data && i < a.size.pairs;
  const int64_t at = home(sh.homes.angles, a.angles, head) + i * a.angles.stride[3];
  uint32_t bits[angle_tokens];
#pragma unroll
  for (int j = 0; j < angle_tokens; ++j)
    bits[j] = turns && first + j < p.n
                  ? cuda::bits_at(a.angles, at + (first + j) * a.angles.stride[1])
                  : 0u;
#pragma unroll
  for (int j = 0; j < angle_tokens; ++j)
    rates_[j] = tanhf(cuda::number_of(a.angles.dtype, bits[j]));
}

// d_angles, and what they leave for d_dt.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::angles_back(int head) {
  constexpr int groups = back_threads / pairs, each = angle_tokens;
  const int i = threadIdx.x % pairs, group = threadIdx.x / pairs, first = group * each;
  const int left = a.angles.data && i < a.size.pairs ? p.n - first : 0;
  float own[each], sum = 0;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int at = Shared::turn_at(first + j, i);
    own[j] = j < left ? sh.of_group[0].torques[at] + sh.of_group[1].torques[at] : 0.0f;
    sum += own[j];
  }
  sh.ends[threadIdx.x] = sum;
  __syncthreads();
  float whole = -(((sh.torque[0][i] + sh.torque[1][i]) + sh.torque[2][i]) + sh.torque[3][i]);
#pragma unroll
  for (int later = groups - 1; later > 0; --later)
    if (later > group) whole += sh.ends[later * pairs + i];
  const float pi = 3.14159265358979f;
  const int64_t to = home(sh.homes.d_angles, a.grad.angles, head) + i * a.grad.angles.stride[3];
#pragma unroll
  for (int j = each - 1; j >= 0; --j) {
    whole += own[j];
    const float rate = rates_[j];
    const float angle = whole * steps(head).dt[first + j] * pi * fmaf(-rate, rate, 1.0f);
    if (b.dangles)
      angles_[j] += angle;
    else if (a.grad.angles.data && j < left)
      cuda::store(a.grad.angles, to + (first + j) * a.grad.angles.stride[1], angle);
    const float by_rate = over_warp(j < left ? whole * rate : 0.0f);
    if (threadIdx.x % 32 == 0) sh.by_rate[i / 32][first + j] = by_rate;
  }
}

// Sums over the heads of the part, where heads share their angles.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::store_angles() {
  const int i = threadIdx.x % pairs, first = threadIdx.x / pairs * angle_tokens, A = a.size.pairs;
  if (!b.dangles || i >= A) return;
  const int lines = a.size.groups * b.parts;
  const int64_t place0 = (place.sequence * wave.slice_chunks + place.in_slice) * C + first;
  float* const to = b.dangles + (place0 * lines + place.group * b.parts + place.part) * A + i;
#pragma unroll
  for (int j = 0; j < angle_tokens; ++j)
    if (first + j < p.n) to[j * int64_t{lines} * A] = angles_[j];
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::steps_back(int head) {
  const int t = threadIdx.x;
  if (t >= p.n) return;
  Unit u = sh.unit;
  u.head = head;
  cuda::Pending x;
  x.lambda = steps(head).lambda[t];
  x.other = steps(head).other[t];
  x.dt = steps(head).dt[t];
  float by_rate = 0;
#pragma unroll
  for (int block = 0; block < blocks; ++block) by_rate += sh.by_rate[block][t];
  x.dgamma = static_cast<double>(sh.of_step[t]) + static_cast<double>(sh.by_same[t]);
  x.ddt = static_cast<double>(x.lambda) * x.dgamma +
          3.14159265358979323846 * static_cast<double>(by_rate);
  cuda::Edge& edge = b.edges[number(head) * wave.segments * a.size.segment + place.chunk];
  if (t == p.n - 1) edge.last = static_cast<double>(sh.of_step[t]);
  if (t > 0)
    store_token(a, u, x, p.first + t, static_cast<double>(sh.of_step[t - 1]));
  else
    edge.first = x;  // waits for the last key of the chunk before
}

// d_adt: what the chunk's end is worth, and of each token behind one what it adds: what its queries
// take of earlier keys and of the state, less what its keys give to later queries and the state.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::decays_back(int head) {
  constexpr int each = C > 32 ? C / 32 : 1;
  const int lane = threadIdx.x & 31;
  double energy = 0;
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) energy += sh.energy[warp];
  double own[each], sum = 0;  // from the last token on
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int t = p.n - 1 - (lane * each + i);
    own[i] =
        t >= 0 ? static_cast<double>(sh.of_query[t] - steps(head).pair[t].z * sh.of_step[t]) : 0.0;
    sum += own[i];
  }
  double before = sum;
#pragma unroll
  for (int step = 1; step < 32 && step < C; step *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  before = __shfl_up_sync(0xffffffffu, before, 1);
  if (lane == 0) before = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int t = p.n - 1 - (lane * each + i);
    before += own[i];
    if (t >= 0)
      cuda::store(a.grad.adt,
                  cuda::at(a.grad.adt, sh.unit.batch, head, sh.unit.begin + p.first + t),
                  steps(head).adt[t] <= -128.0f ? 0.0f : static_cast<float>(energy + before));
  }
}

// What the chunk adds to the sums of the head's parameters.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::parameters_back(int head) {
  auto* const to = reinterpret_cast<float*>(sh.from.partial.of(head));
  float* const projections = to + 2 * R * columns;
  // Eight columns of one r: of two slots the lanes that have them, of four warps each.
  constexpr int wide = R * columns / 8, narrow = R * values / 8;
#pragma unroll 1
  for (int item = threadIdx.x; item < 2 * wide + 3 * narrow; item += back_threads) {
    const bool of_rows = item < 2 * wide;
    const int width = of_rows ? columns : values, each = of_rows ? wide : narrow;
    const int within = of_rows ? item : item - 2 * wide, which = within / each;
    const int r = within % each % R, first = within % each / R;
    const float* from = reinterpret_cast<const float*>(which == 0 ? sh.d_y : sh.v);
    if (!of_rows) from = sh.by_value[which];
    const float* const at = from + 2 * first * Shared::lanes + 4 * r;
    float4 sums[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const auto* const four = reinterpret_cast<const float4*>(at + odd * Shared::lanes);
      const float4 x = four[0], y = four[R], z = four[2 * R], w = four[3 * R];
      sums[odd] = {((x.x + y.x) + z.x) + w.x, ((x.y + y.y) + z.y) + w.y, ((x.z + y.z) + z.z) + w.z,
                   ((x.w + y.w) + z.w) + w.w};
    }
    float* const own = (of_rows ? to : projections) + (which * R + r) * width + 8 * first;
    own[0] = sums[0].x, own[1] = sums[1].x, own[2] = sums[0].y, own[3] = sums[1].y;
    own[4] = sums[0].z, own[5] = sums[1].z, own[6] = sums[0].w, own[7] = sums[1].w;
  }
  if (threadIdx.x == 0)
    projections[3 * R * values + values] =
        static_cast<float>(((sh.traces[0] + sh.traces[1]) + sh.traces[2]) + sh.traces[3]);
}

}  // namespace talea::mamba3::sm90
