// What: gradients of the steps and angles of the tokens of a chunk.
// Why: they are sums of what the groups left behind, in fixed order.
// Never: sums with atomics.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::store_token(const cuda::Pending& x,
                                                                 int64_t token, double db) {
  const cuda::GradientViews& d = a.grad;
  if (d.dt.data)
    cuda::store(d.dt, cuda::at(d.dt, u.batch, u.head, u.begin + token),
                static_cast<float>(x.ddt + static_cast<double>(x.other) * db));
  if (d.trap.data)
    cuda::store(d.trap, cuda::at(d.trap, u.batch, u.head, u.begin + token),
                static_cast<float>(static_cast<double>(x.lambda) * static_cast<double>(x.other) *
                                   static_cast<double>(x.dt) * (x.dgamma - db)));
}

// Gradients of the steps, decays and angles of the chunk's tokens.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::tokens(int64_t chunk, const Part& at,
                                                            float& first_anchor) {
  const cuda::GradientViews& d = a.grad;
  const int A = a.size.pairs, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const bool last = !at.more;
  constexpr float pi = 3.14159265358979f;
  if (static_cast<int>(threadIdx.x) < A) {
    const int i = threadIdx.x;
    const auto& of = sh.torque[chunk & 1];
    const float sum = ((of[0][i] + of[1][i]) + of[2][i]) + of[3][i];
    if (last) first_anchor = sum;
    float whole = first_anchor - sum;
#pragma unroll 1
    for (int t = at.n - 1; t >= 0; t -= 8) {
      float some[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int place = (t - j >= 0 ? t - j : 0) * Shared::apart + i;
        some[j] = sh.turn_q[place] + sh.turn_k[place];
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        whole += some[j];
        if (t - j >= 0) sh.turn_q[(t - j) * Shared::apart + i] = whole;
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int t = warp; t < at.n; t += back_threads / 32) {
    float sum = 0;
    const int64_t token = u.begin + at.first + t;
    const int64_t place =
        ((u.sequence - wave.first) * wave.slice_chunks + (chunk - slice.low)) * C + t;
    if (a.angles.data)
#pragma unroll 1
      for (int i = lane; i < A; i += 32) {
        const float rate =
            tanhf(cuda::read(a.angles, cuda::at(a.angles, u.batch, token, u.head, i)));
        const float whole = sh.turn_q[t * Shared::apart + i];
        const auto slope = static_cast<float>(1 - static_cast<double>(rate) * rate);
        const float angle = whole * sh.raw.dt[t] * pi * slope;
        if (b.dangles)
          b.dangles[(place * a.size.heads + u.head) * A + i] = angle;
        else if (d.angles.data)
          cuda::store(d.angles, cuda::at(d.angles, u.batch, token, u.head, i), angle);
        sum += whole * rate;
      }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) {
      float far = ((sh.by_later[0][t] + sh.by_later[1][t]) + sh.by_later[2][t]) + sh.by_later[3][t];
#pragma unroll
      for (int r = 0; r < R; ++r) far += sh.by_state[t * R + r];
      sh.by_rate[t] = sum;
      sh.of_step[t] = far;
    }
  }
  __syncthreads();
  if (warp == 0 && d.adt.data) decays_back(chunk, at);
  if (warp >= 2 && warp < 4) {
    const int t = threadIdx.x - 64;
    if (t < at.n) {
      cuda::Pending x;
      x.lambda = sh.more.lambda[t];
      x.other = sh.more.other[t];
      x.dt = sh.raw.dt[t];
      float near = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) near += sh.by_same[t * R + r];
      x.dgamma = static_cast<double>(sh.of_step[t]) + static_cast<double>(near);
      x.ddt = static_cast<double>(x.lambda) * x.dgamma +
              3.14159265358979323846 * static_cast<double>(sh.by_rate[t]);
      if (t > 0) {
        store_token(x, at.first + t, static_cast<double>(sh.of_step[t - 1]));
      } else {
        // The first token of the chunk behind has waited for the last key of this one.
        cuda::Pending* const waits = b.pending + slice.number;
        if (waits->waits)
          store_token(*waits, at.first + at.n, static_cast<double>(sh.of_step[at.n - 1]));
        x.waits = 1;
        *waits = x;
      }
    }
  }
  __syncthreads();
}

}  // namespace talea::mamba3::sm90
