// What: d_adt of the tokens of a chunk.
// Why: each is the worth of the chunk's end and what the tokens behind it add.
// Never: sums with atomics.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// d_adt: what the chunk's end is worth, and of each token behind one what it adds.
template <int R, int blocks>
__device__ __forceinline__ void Backward<R, blocks>::decays_back(int64_t chunk, const Part& at) {
  constexpr int each = C > 32 ? C / 32 : 1;
  const int lane = threadIdx.x & 31;
  const auto& of = sh.energy[chunk & 1];
  const double energy = ((of[0] + of[1]) + of[2]) + of[3];
  double own[each], sum = 0;  // from the last token on
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int t = at.n - 1 - (lane * each + i);
    float dot = 0;
    if (t >= 0)
#pragma unroll
      for (int r = 0; r < R; ++r) dot += sh.dots_q[t * R + r] - sh.dots_k[t * R + r];
    own[i] = static_cast<double>(dot);
    sum += own[i];
  }
  double before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  before = __shfl_up_sync(0xffffffffu, before, 1);
  if (lane == 0) before = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int t = at.n - 1 - (lane * each + i);
    before += own[i];
    if (t >= 0)
      cuda::store(a.grad.adt, cuda::at(a.grad.adt, u.batch, u.head, u.begin + at.first + t),
                  sh.raw.adt[t] <= -128.0f ? 0.0f : static_cast<float>(energy + before));
  }
}

}  // namespace talea::mamba3::sm90
