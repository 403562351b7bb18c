// What: online softmax of narrow.cuh: a thread's rows, their references and sums.
// Why: the two warpgroups of consume.cuh have the same references after each pair of tiles: theirs
// is one here.
// Never: sums in an order other than theirs: the bits are theirs.
#pragma once

#include "ops/sparse_attention/sm90/consume.cuh"
#include "ops/sparse_attention/sm90/narrow_shape.cuh"

namespace talea::sparse_attention::sm90 {

template <class S>
struct NarrowRows {
  static constexpr int half = S::half, halves = S::halves;

  float o[halves][half / 2];
  float reference[2], top[2], sum[2][2], pending[2][2];  // [row]; sum, pending: [tile][row]

  __device__ void begin_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = top[i] = -INFINITY;
      sum[0][i] = sum[1][i] = 0;
      pending[0][i] = pending[1][i] = 1;
    }
#pragma unroll
    for (int h = 0; h < halves; ++h)
#pragma unroll
      for (float& x : o[h]) x = 0;
  }
  __device__ void hold() {
#pragma unroll
    for (int h = 0; h < halves; ++h) ptx::hold_registers(o[h]);
  }

  // s: scores; p: the weights of a tile, relative to `to`. Whether a slot is valid.
  template <int kTile>
  __device__ bool weigh_tile(float (&s)[32], float scale, uint32_t (&p)[16], float (&to)[2],
                             float (&part)[2]) {
    float most[2];
    const uint64_t valid = *reinterpret_cast<const volatile uint64_t*>(S::beside().valid[kTile]);
    scale_and_mask(s, valid, scale);
    most_of<S::rows>(s, most);
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      top[i] = fmaxf(top[i], most[i]);
      to[i] = reference_of(reference[i], most[i]);
    }
    weigh<S::f16, S::rows>(s, to, part, p);
#pragma unroll
    for (uint32_t& x : p) asm volatile("" : "+r"(x));  // zeros, too, stand in registers
    return valid != 0;
  }

  // Half h of the values first takes tile h, as the warpgroup does that weighs that tile: before,
  // by what its sums change; then the other tile.
  __device__ void own_tile_first(int h, const float (&to)[2], const float (&part)[2]) {
    float factor[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      factor[i] = change_of(reference[i], to[i]);
      sum[h][i] = __fmaf_rn(sum[h][i], factor[i], part[i]);
      factor[i] *= pending[h][i];
    }
    if (h < halves) multiply_rows(o[h < halves ? h : 0], factor);
  }
  // waits: products of that half may be under way.
  __device__ void others_tile_next(int h, const float (&own)[2], const float (&other)[2],
                                   bool waits) {
    float before[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < S::rows; ++i) {
      const Meeting m = meeting_of(own[i], other[i]);
      before[i] = m.before;
      pending[h][i] = m.after;
      if (own[i] < other[i]) sum[h][i] *= m.before;
    }
    if (waits) {  // all warps: whether a reference moved is one warp's own
      ptx::warpgroup_wait<0>();
      hold();
    }
    if (h >= halves || !__any_sync(~0u, before[0] != 1.0f || before[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < half / 2; ++i) o[h < halves ? h : 0][i] *= before[i / 2 % 2];
  }
  __device__ void meet(const float (&to)[2][2]) {
#pragma unroll
    for (int i = 0; i < S::rows; ++i) reference[i] = to[0][i] < to[1][i] ? to[1][i] : to[0][i];
  }
};

}  // namespace talea::sparse_attention::sm90
