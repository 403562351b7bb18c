// What: what the units of a head leave for each other in the gradients: sums over slabs and parts; d_d.
// Why: it is rounded once, whatever a head is cut into.
// Never: of heads that are units, but for d_d of none.
#pragma once

#include "ops/mamba3/sm90/backward.cuh"

namespace talea::mamba3::sm90 {

// The place of a head among those of all blocks: a block has one at a time, or, with parts of N,
// comes back to all of its own.
__device__ __forceinline__ int64_t head_of_block(const Args& a, const Cut& cut,
                                                 const UnitBuffers& b, int head) {
  if (cut.part_bits == 0) return blockIdx.x;
  return blockIdx.x * int64_t{(a.size.heads_per_group + b.parts - 1) / b.parts} + head;
}

// d_d of a unit, from eight numbers of a row of each thread. Of dO and values that are not rounded:
// it is one number a head, and of few rows what their operands lose does not average out. Of whole
// heads it is the trace of dO V^T.
template <int R, int blocks, bool halves>
__device__ __forceinline__ float Backward<R, blocks, halves>::d_d_of(int head,
                                                                     const float (&d_y)[8]) const {
  if (cut.whole) return 0;
  const int row = threadIdx.x / 8, c = threadIdx.x % 8 * 8;
  const auto* const at = static_cast<const __nv_bfloat16*>(a.v.data) + home(sh.homes.v, a.v, head) +
                         row / R * a.v.stride[1] + c;
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(at));
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float by[8], sum = 0;
  take_projection(sh.mimo_v, row % R, c, by);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sum += d_y[i] * by[i] * (i & 1 ? high_of(words[i / 2]) : low_of(words[i / 2]));
  return sum;
}
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_d_d(float sum) const {
  if (cut.whole) return;
  sum = over_warp(sum);
  if (threadIdx.x % 32 == 0) static_cast<UnitShared<R, blocks>&>(sh).d_d[threadIdx.x / 32] = sum;
}

// A block has the units of a head one after another, and each number the same thread, which finds
// what the units before have left; the last one stores.
template <int R, int blocks, bool halves>
__device__ __forceinline__ void Backward<R, blocks, halves>::put_of_units(int head, int i,
                                                                          const View& to,
                                                                          int64_t at, float x,
                                                                          bool of_part) const {
  if (cut.whole) return cuda::store(to, at, x);
  const int last = (1 << (of_part ? cut.slab_bits : cut.bits())) - 1;
  const int64_t own = head_of_block(a, cut, b, cut.head_of(head) - cut.head_of(place.first));
  float* const left = cut.slabs + own * cuda::slab_count(C, pairs) + i;
  if ((head & last) != 0) x += *left;
  if ((head & last) == last)
    cuda::store(to, at, x);
  else
    *left = x;
}

template <int R, int blocks, bool halves>
__device__ __forceinline__ bool Backward<R, blocks, halves>::sum_of_parts(int head, int which,
                                                                          float (&x)[32]) const {
  if (cut.part_bits == 0) return true;
  const int64_t own = head_of_block(a, cut, b, cut.head_of(head) - cut.head_of(place.first))
                      << cut.slab_bits;
  float4* const at = reinterpret_cast<float4*>(cut.tiles) +
                     ((own + cut.slab_of(head)) * 2 + which) * (rows * values / 4) + thread;
  const bool last = cut.part_of(head) > 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (last) {
      const float4 before = at[i * 128];
      x[4 * i] += before.x, x[4 * i + 1] += before.y;
      x[4 * i + 2] += before.z, x[4 * i + 3] += before.w;
    } else {
      at[i * 128] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    }
  }
  return last;
}

}  // namespace talea::mamba3::sm90
