// What: what a slice adds to the sums of the parameters of a head.
// Why: fp32 within a slice, fp64 across slices, in fixed order.
// Never: sums over heads.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// What the slice adds to the sums of the head's parameters.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::add_parameters() {
  double* const to = b.parameters + slice.number * cuda::parameter_count(a.size);
  double own = group == 0 ? static_cast<double>(trace) : 0.0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
  if (group == 0 && thread % 32 == 0) sh.traces[thread / 32] = own;
  __syncthreads();
  const auto sum_of = [&](const float* from, int r, int c) {
    double sum = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w)
      sum += static_cast<double>(
          from[(c / 8 * 2 + (c & 1)) * Shared::lanes + w * 4 * R + r * 4 + c % 8 / 2]);
    return sum;
  };
  for (int i = threadIdx.x; i < R * columns; i += back_threads) {
    const int r = i / columns, c = i % columns;
    to[i] += sum_of(sh.rows_q, r, c);
    to[R * columns + i] += sum_of(sh.rows_k, r, c);
  }
  double* const projections = to + 2 * R * columns;
  for (int i = threadIdx.x; i < R * values; i += back_threads) {
    const int r = i / values, c = i % values;
    projections[i] += sum_of(sh.by_v, r, c);
    projections[R * values + i] += sum_of(sh.by_z, r, c);
    projections[2 * R * values + i] += sum_of(sh.by_out, r, c);
  }
  if (threadIdx.x == 0)
    projections[3 * R * values + values] +=
        ((sh.traces[0] + sh.traces[1]) + sh.traces[2]) + sh.traces[3];
}

}  // namespace talea::mamba3::sm90
