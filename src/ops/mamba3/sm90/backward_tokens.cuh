// What: gradients of steps, angles and decays of the tokens of a chunk, and of the head's parameters.
// Why: they are sums of what the groups left behind, in fixed order.
// Never: sums with atomics.
#pragma once

#include "ops/mamba3/sm90/backward_units.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks, bool halves>
template <bool handed>
__device__ __forceinline__ void Backward<R, blocks, halves>::tokens(
    int head, const uint32_t (&rates)[angle_tokens]) {
  angles_back<handed>(head, rates);
  // The last warp has the last tokens, behind which little is summed.
  if (threadIdx.x >= others) {
    if (a.grad.adt.data) decays_back(head);
  } else {
    parameters_back(head);
  }
  __syncthreads();
  // What is read from here on is written again behind a barrier of the next head.
  if (threadIdx.x >= 64 && threadIdx.x < 128) steps_back(head);
}

// The angles of a thread's tokens are under way while its group waits for the others.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::begin_angles(
    int head, uint32_t (&rates)[angle_tokens]) {
  const int i = threadIdx.x % pairs, first = threadIdx.x / pairs * angle_tokens, n = p.n;
  const int64_t at = angles_home(sh.homes.angles, a.angles, head) + i * a.angles.stride[3];
#pragma unroll
  for (int j = 0; j < angle_tokens; ++j) {
    rates[j] = 0;
    if (a.angles.data && i < cut.pairs_of(a.size, cut.part_of(head)) && first + j < n)
      rates[j] = cuda::bits_at(a.angles, at + (first + j) * a.angles.stride[1]);
  }
}

// d_angles, and what they leave for d_dt: a thread has a pair of a few tokens.
template <int R, int blocks, bool halves>
template <bool handed>
__device__ __forceinline__ void Backward<R, blocks, halves>::angles_back(
    int head, const uint32_t (&rates)[angle_tokens]) {
  constexpr int groups = back_threads / pairs, each = angle_tokens;
  const int i = threadIdx.x % pairs, own_group = threadIdx.x / pairs, A = a.size.pairs;
  const int first = own_group * each;
  const bool turns = (handed || a.angles.data) && i < cut.pairs_of(a.size, cut.part_of(head));
  float own[each], sum = 0;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int t = first + j, at = Shared::turn_at(t, i);
    own[j] = turns && t < p.n ? sh.turn_q()[at] + sh.turn_k()[at] : 0.0f;
    sum += own[j];
  }
  if constexpr (each > 1) sh.ends[threadIdx.x] = sum;
  if (threadIdx.x < C) {
    const int t = threadIdx.x;
    float far = ((sh.by_later[0][t] + sh.by_later[1][t]) + sh.by_later[2][t]) + sh.by_later[3][t];
#pragma unroll
    for (int r = 0; r < R; ++r) far += sh.by_state[t * R + r];
    sh.of_step[t] = far;
  }
  float whole = 0;
  whole -= sh.torques[i];
  if constexpr (handed) whole += turn_behind(a, b, sh.unit, head, i);
  if constexpr (each > 1) {
    __syncthreads();
#pragma unroll 4
    for (int later = groups - 1; later > own_group; --later) whole += sh.ends[later * pairs + i];
  } else if (turns) {
#pragma unroll 4
    for (int later = C - 1; later > own_group; --later) {
      if (later >= p.n) continue;
      const int at = Shared::turn_at(later, i);
      whole += sh.turn_q()[at] + sh.turn_k()[at];
    }
  }
  const float pi = 3.14159265358979f;
#pragma unroll
  for (int j = each - 1; j >= 0; --j) {
    const int t = first + j;
    float by_rate = 0;
    if (turns && t < p.n) {
      whole += own[j];
      if constexpr (handed)
        if (t == 0) store_first_angle(a, sh.unit, p, head, i, whole);
      const float given = cuda::number_of(a.angles.dtype, rates[j]);
      const float angle = whole * steps().dt[t] * pi * cuda::slope_of_tanh(given);
      if (b.dangles) {
        const int64_t at = (place.sequence * wave.slice_chunks + place.in_slice) * C + t;
        b.dangles[(at * a.size.heads + head) * A + i] = angle;
      } else if (a.grad.angles.data) {
        put_of_units(head, 3 * C + t * pairs + i, a.grad.angles,
                     angles_home(sh.homes.d_angles, a.grad.angles, head) +
                         t * a.grad.angles.stride[1] + i * a.grad.angles.stride[3],
                     angle, true);
      }
      by_rate = whole * tanhf(given);
    }
    by_rate = over_warp(by_rate);
    if (threadIdx.x % 32 == 0 && (C * pairs >= back_threads || t < C))
      sh.by_rate[i / 32][t] = by_rate;
  }
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::steps_back(int head) {
  const int t = threadIdx.x - 64;
  if (t >= p.n) return;
  const Unit u = unit(head);
  cuda::Pending x;
  x.lambda = steps().lambda[t];
  x.other = steps().other[t];
  x.dt = steps().dt[t];
  float near = 0, by_rate = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) near += sh.by_same[t * R + r];
#pragma unroll
  for (int block = 0; block < blocks; ++block) by_rate += sh.by_rate[block][t];
  x.dgamma = static_cast<double>(sh.of_step[t]) + static_cast<double>(near);
  x.ddt = static_cast<double>(x.lambda) * x.dgamma +
          3.14159265358979323846 * static_cast<double>(by_rate);
  cuda::Edge& edge = b.edges[number(head) * wave.segments * a.size.segment + place.chunk];
  if (t == p.n - 1) edge.last = sh.of_step[t];
  if (t > 0)
    put_token(a, u, x, p.first + t, static_cast<double>(sh.of_step[t - 1]),
              [&](const View& to, int64_t at, float own) {
                put_of_units(head, (&to == &a.grad.dt ? C : 2 * C) + t, to, at, own);
              });
  else
    edge.put_first(x);  // waits for the last key of the chunk before
}

// d_adt: what the chunk's end is worth, and of each token behind one what it adds.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::decays_back(int head) {
  constexpr int each = C > 32 ? C / 32 : 1;
  const Unit& u = sh.unit;
  const int lane = threadIdx.x & 31;
  double energy = lane < 16 ? sh.energy[lane] : 0.0;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) energy += __shfl_xor_sync(0xffffffffu, energy, step);
  energy = mutant(Mutant::m3_anchor_dropped) ? 0 : __shfl_sync(0xffffffffu, energy, 0);
  double own[each], sum = 0;  // from the last token on
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int t = p.n - 1 - (lane * each + i);
    float dot = 0;
    if (t >= 0)
#pragma unroll
      for (int r = 0; r < R; ++r) dot += sh.dots_q[t * R + r] - sh.dots_k[t * R + r];
    own[i] = static_cast<double>(dot);
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
      put_of_units(head, t, a.grad.adt,
                   cuda::at(a.grad.adt, u.batch, cut.head_of(head), u.begin + p.first + t),
                   steps().adt[t] <= -128.0f ? 0.0f : static_cast<float>(energy + before));
  }
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ float Backward<R, blocks, halves>::d_d() const {
  if (cut.whole)
    return static_cast<float>(((sh.traces[0] + sh.traces[1]) + sh.traces[2]) + sh.traces[3]);
  double sum = 0;
  for (const float x : static_cast<const UnitShared<R, blocks>&>(sh).d_d)
    sum += static_cast<double>(x);
  return static_cast<float>(sum);
}

// What the chunk adds to the sums of the head's parameters.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::parameters_back(int head) {
  auto* const to = reinterpret_cast<float*>(sh.from.partial.of(head));
  const auto column_of = [](int i) {
    const int slot = i / (4 * R);
    return slot / 2 * 8 + (slot & 1) + i % 4 * 2;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < R * columns; i += others) {
    const int at = i / 4 % R * columns + column_of(i);
    to[at] = sum_alike<R>(sh.rows_q, i);
    to[R * columns + at] = sum_alike<R>(sh.rows_k, i);
  }
  float* const projections = to + 2 * R * columns;
#pragma unroll 1
  for (int i = threadIdx.x; i < R * values; i += others) {
    const int at = i / 4 % R * values + column_of(i);
    projections[at] = sum_alike<R>(sh.by_v, i);
    projections[R * values + at] = sum_alike<R>(sh.by_z(), i);
    projections[2 * R * values + at] = sum_alike<R>(sh.by_out(), i);
  }
  if (threadIdx.x == others - 1) projections[3 * R * values + values] = d_d();
}

}  // namespace talea::mamba3::sm90
