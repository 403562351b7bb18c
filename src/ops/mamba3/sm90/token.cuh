// What: d_dt and d_trap of a token, from what its chunk and the key behind it have left.
// Why: the first token of a chunk waits for the chunk before, the others do not.
// Never: reads what a chunk still writes.
#pragma once

#include "ops/mamba3/rows/chunk.hpp"

namespace talea::mamba3::sm90 {

// What the units of a head add up to: a block has them one after another, and each number the same
// thread, which finds what the units before have left; the last one stores.
struct SlabSums {
  float* left = nullptr;
  bool first = true, last = true;

  __device__ __forceinline__ float add(int i, float x) const {
    if (!first) x += left[i];
    if (!last) left[i] = x;
    return x;
  }
};
// Place of a head among those of all blocks of the gradients: a block has one at a time, or, with
// parts of N, comes back to all of its.
__device__ __forceinline__ int64_t head_of_block(const cuda::Args& a, const cuda::UnitBuffers& b,
                                                 int head) {
  if (a.size.part_bits == 0) return blockIdx.x;
  return blockIdx.x * int64_t{(a.size.heads_per_group + b.parts - 1) / b.parts} + head;
}
// Of unit `number`; head: its head, of the block. each_part: of one part of N.
template <int C, int pairs>
__device__ __forceinline__ SlabSums slab_sums(const cuda::Args& a, const cuda::UnitBuffers& b,
                                              int number, int head, bool each_part = false) {
  SlabSums sums;
  const int bits = each_part ? a.size.slab_bits : a.size.slab_bits + a.size.part_bits;
  if (bits == 0) return sums;
  const int last = (1 << bits) - 1;
  sums.left = b.slabs + head_of_block(a, b, head) * (C * (3 + pairs));
  sums.first = (number & last) == 0, sums.last = (number & last) == last;
  return sums;
}
// Where each number lies: d_adt, d_dt, d_trap of a token, d_angles of a pair of it.
template <int C, int pairs>
struct SlabPlaces {
  static constexpr int adt = 0, dt = C, trap = 2 * C;
  static __device__ __forceinline__ int angle(int t, int pair) { return 3 * C + t * pairs + pair; }
};

// `sums`: of token t of its chunk.
template <int C = 0>
__device__ __forceinline__ void store_token(const cuda::Args& a, const cuda::Unit& u,
                                            const cuda::Pending& x, int64_t token, double db,
                                            const SlabSums& sums = {}, int t = 0) {
  const cuda::GradientViews& d = a.grad;
  if (d.dt.data) {
    const float own =
        sums.add(C + t, static_cast<float>(x.ddt + static_cast<double>(x.other) * db));
    if (sums.last) cuda::store(d.dt, cuda::at(d.dt, u.batch, u.head, u.begin + token), own);
  }
  if (d.trap.data) {
    const float own = sums.add(
        2 * C + t, static_cast<float>(static_cast<double>(x.lambda) * static_cast<double>(x.other) *
                                      static_cast<double>(x.dt) * (x.dgamma - db)));
    if (sums.last) cuda::store(d.trap, cuda::at(d.trap, u.batch, u.head, u.begin + token), own);
  }
}

}  // namespace talea::mamba3::sm90
