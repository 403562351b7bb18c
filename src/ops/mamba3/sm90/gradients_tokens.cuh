// What: gradients of steps, angles and decays of the tokens of a chunk.
// Why: they are sums of what the other warpgroups left behind, in fixed order.
// Never: sums with atomics.
#pragma once

#include "ops/mamba3/sm90/gradients.cuh"

namespace talea::mamba3::sm90 {

// exp(-2 |x|) with the sign of x: tanh and its slope come of it without a difference of which
// nothing would be left where tanh is near 1.
__device__ __forceinline__ float rate_of(float x) { return copysignf(expf(-2 * fabsf(x)), x); }
// One division is of both: of 1 and 2 it is a product.
__device__ __forceinline__ float tanh_and_slope(float rate, float& slope) {
  asm volatile("" : "+f"(rate));  // registers that both would take from head to head are spilled
  const float e = fabsf(rate), by = __fdividef(1, 1 + e);
  slope = 4 * e * by * by;
  return copysignf((1 - e) * by, rate);
}

// A thread has a pair of a few tokens.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::read_rates(int head) {
  const int i = thread % pairs, first = thread / pairs * angle_tokens;
  const bool turns = a.angles.data && i < a.size.pairs;
  const int64_t at = angles_home(sh.homes.angles, a.angles, head) + i * a.angles.stride[3];
  uint32_t bits[angle_tokens];
#pragma unroll
  for (int j = 0; j < angle_tokens; ++j)
    bits[j] = turns && first + j < n
                  ? cuda::bits_at(a.angles, at + (first + j) * a.angles.stride[1])
                  : 0u;
#pragma unroll
  for (int j = 0; j < angle_tokens; ++j)
    rates_[j] = rate_of(cuda::number_of(a.angles.dtype, bits[j]));
}

// d_angles, and what they leave for d_dt. whole: of all tokens and pairs.
template <int R, int blocks, bool halves, int slabs>
template <bool handed, bool whole>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::angles_back(int head) {
  constexpr int each = angle_tokens, groups = 128 / pairs;
  const int thread = own_thread();
  const int i = thread % pairs, group = thread / pairs, first = group * each, A = a.size.pairs;
  const int lane = thread & 31;
  const int left = whole ? each : (handed || a.angles.data) && i < A ? n - first : 0;
  const auto live = [&](int j) { return whole || j < left; };
  float own[each], sum = 0, behind = 0;
  if constexpr (handed) behind = turn_behind(a, b, sh.unit, head, i);
  const int first_at = Shared::turn_at(first, i);
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int at = (first_at ^ (j & 7) << 2) + j * pairs;  // no carry: `each` or 8 divides `first`
    own[j] = live(j) ? sh.turn_q[at] + sh.turn_k[at] : 0.0f;
    sum += own[j];
  }
  sh.ends[thread] = sum;
  hopper::named_barrier_sync(rows_own, 128);
  const float* const torque = sh.torque[third(head)][0] + i;
  float turn = -(((torque[0] + torque[pairs]) + torque[2 * pairs]) + torque[3 * pairs]);
  if constexpr (handed) turn += behind;
#pragma unroll
  for (int later = groups - 1; later > 0; --later)
    if (later > group) turn += sh.ends[later * pairs + i];
      // What lies at a token and behind it.
#pragma unroll
  for (int j = each - 1; j >= 0; --j) own[j] = turn += own[j];
  if constexpr (handed)
    if (first == 0 && i < A) store_first_angle(a, sh.unit, sh.part, head, i, own[0]);
  // f(j, x, slope) of some tokens, whose angle has x slope; own is left with what d_dt has of them.
  // Steps are read ahead of the stores, behind which the compiler would leave them.
  constexpr int some = each < 4 ? each : 4;
  const auto some_angles = [&](int j0, auto f) {
    constexpr float pi = 3.14159265358979f;
    float dt[some];
    const float* const from = late(head).dt + first + j0;
    if constexpr (some == 4) {
      const auto four = *reinterpret_cast<const float4*>(from);
      dt[0] = four.x, dt[1] = four.y, dt[2] = four.z, dt[3] = four.w;
    } else {
      const auto two = *reinterpret_cast<const float2*>(from);
      dt[0] = two.x, dt[1] = two.y;
    }
#pragma unroll
    for (int j = 0; j < some; ++j) {
      float slope;
      const float x = own[j0 + j], tanh = tanh_and_slope(rates_[j0 + j], slope);
      own[j0 + j] = live(j0 + j) ? x * tanh : 0.0f;
      if (live(j0 + j)) f(j, x * dt[j] * pi, slope);
    }
  };
  if (b.dangles) {
    // Sums over the part's heads: what lies there is this thread's own.
    const int lines = a.size.groups * b.parts;
    const int64_t place0 = (place.sequence * wave.slice_chunks + place.in_slice) * C + first;
    float* to = b.dangles + (place0 * lines + place.group * b.parts + place.part) * A + i;
    const int64_t apart = int64_t{lines} * A;
#pragma unroll
    for (int j0 = 0; j0 < each; j0 += some) {
      float* at[some];
      float before[some] = {};
#pragma unroll
      for (int j = 0; j < some; ++j) at[j] = to, to += apart;
      if (head_of(head) > head_of(place.first)) {
#pragma unroll
        for (int j = 0; j < some; ++j)
          if (live(j0 + j)) before[j] = *at[j];
      }
      some_angles(j0, [&](int j, float x, float slope) { *at[j] = fmaf(x, slope, before[j]); });
    }
  } else {
    const int64_t to = angles_home(sh.homes.d_angles, a.grad.angles, head) +
                       first * a.grad.angles.stride[1] + i * a.grad.angles.stride[3];
#pragma unroll
    for (int j0 = 0; j0 < each; j0 += some)
      some_angles(j0, [&](int j, float x, float slope) {
        if (a.grad.angles.data)
          cuda::store(a.grad.angles, to + (j0 + j) * a.grad.angles.stride[1], x * slope);
      });
  }
  const float by_rate = shared_over_warp<each>(own);
  if (lane % (32 / each) == 0) sh.by_rate[i / 32][first + lane / (32 / each)] = by_rate;
  hopper::named_barrier_sync(rows_own, 128);
  if (thread < C && thread < n) steps_back(head);
}

template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::steps_back(int head) {
  const int t = own_thread();
  Unit u = sh.unit;
  u.head = head_of(head);
  cuda::Pending x;
  x.lambda = late(head).lambda[t];
  x.other = late(head).other[t];
  x.dt = late(head).dt[t];
  const float near = sh.by_same[shared_stage(head)][t];
  float by_rate = 0;
#pragma unroll
  for (int block = 0; block < blocks; ++block) by_rate += sh.by_rate[block][t];
  x.dgamma = static_cast<double>(sh.of_step[shared_stage(head)][t]) + static_cast<double>(near);
  x.ddt = static_cast<double>(x.lambda) * x.dgamma +
          3.14159265358979323846 * static_cast<double>(by_rate);
  cuda::Edge& edge = b.edges[number(head) * wave.segments * a.size.segment + place.chunk];
  if (t == n - 1) edge.last = sh.of_step[shared_stage(head)][t];
  if (t > 0)
    store_token(a, u, x, sh.part.first + t,
                static_cast<double>(sh.of_step[shared_stage(head)][t - 1]));
  else
    edge.put_first(x);  // waits for the last key of the chunk before
}

// d_d; d_adt: what the chunk's end is worth, and of each token behind one what it adds. The last
// two warps have them: the first two have the steps.
template <int R, int blocks, bool halves, int slabs>
__device__ __forceinline__ void Gradients<R, blocks, halves, slabs>::decays_back(int head) {
  constexpr int each = C > 32 ? C / 32 : 1;
  const int thread = own_thread();
  const int lane = thread & 31, slot = stage(head);
  if (thread == 64) {
    const double* const x = sh.traces[slot];
    reinterpret_cast<float*>(sh.from.partial.of(head))[R * (2 * columns + 3 * values) + values] =
        static_cast<float>(((x[0] + x[1]) + x[2]) + x[3]);
  }
  if (!is_last(head)) return;
  if (thread < 96 || !a.grad.adt.data) return;
  const double* const e = sh.energy[third(head)];
  const bool dropped = R == 1 ? mutant(ScanMutant::m3_anchor_dropped_siso)
                              : mutant(ScanMutant::m3_anchor_dropped_ranks);
  const double energy = dropped ? 0 : ((e[0] + e[1]) + e[2]) + e[3];
  double own[each], sum = 0;  // from the last token on
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int t = n - 1 - (lane * each + i);
    float dot = 0;
    if (t >= 0) dot = sh.dots_q[t] - sh.dots_k[t];
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
    const int t = n - 1 - (lane * each + i);
    before += own[i];
    if (t >= 0)
      cuda::store(
          a.grad.adt,
          cuda::at(a.grad.adt, sh.unit.batch, head_of(head), sh.unit.begin + sh.part.first + t),
          late(head).adt[t] <= -128.0f ? 0.0f : static_cast<float>(energy + before));
  }
}

}  // namespace talea::mamba3::sm90
