// What: dkv of 64 keys and columns, from the accumulators of a warpgroup to the rows of its keys.
// Why: lines of 128 bytes: what adds them up is bound by their number.
// Never: writes a row that no valid slot names.
#pragma once

#include "ops/sparse_attention/sm90/backward_tile.hpp"

namespace talea::sparse_attention::sm90 {

__device__ inline float2 exchanged(float2 x, int by) {
  return {__shfl_xor_sync(~0u, x.x, by), __shfl_xor_sync(~0u, x.y, by)};
}

// Adds a chunk to the rows of its keys, or stores it as their contribution: lines of 128 bytes.
// A quad of lanes has eight pieces of 32 bytes of a row. First neighbours exchange, so that each
// lane has 16 bytes in a row of every second piece; then quads, so that eight lanes have 128
// bytes of a row: instruction `turn` writes the rows of even or odd quads.
__device__ inline void give(const Backward& p, int thread, const float (&x)[32], int c,
                            float* const (&to)[2][2]) {
  const int lane = thread % 32, odd = lane % 2, quad = lane / 4 % 2;
  const int left = static_cast<int>(p.f.dim) - c * chunk_columns;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int n = 0; n < 8; n += 4) {  // 128 bytes of a row
      float4 piece[2];                // of the blocks n, n + 1 and n + 2, n + 3
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int i = 4 * (n + 2 * k) + 2 * e;
        const float2 even = {x[i] * p.grown, x[i + 1] * p.grown};
        const float2 next = {x[i + 4] * p.grown, x[i + 5] * p.grown};
        const float2 kept = odd ? next : even, other = exchanged(odd ? even : next, 1);
        piece[k] = odd ? make_float4(other.x, other.y, kept.x, kept.y)
                       : make_float4(kept.x, kept.y, other.x, other.y);
      }
      const float4 sent = quad ? piece[0] : piece[1];
      const float2 low = exchanged({sent.x, sent.y}, 4), high = exchanged({sent.z, sent.w}, 4);
      const float4 got = make_float4(low.x, low.y, high.x, high.y);
      const float4 kept = quad ? piece[1] : piece[0];
      // Of its own row a quad keeps the half that is its place in the line.
      const int at = (n + 2 * quad + odd) * 8 + lane / 2 % 2 * 4;
      if (at >= left) continue;
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        float* row = to[e][turn];
        if (!row) continue;
        const float4 y = turn == quad ? kept : got;
        auto* target = reinterpret_cast<float4*>(row + c * chunk_columns + at);
        if (p.contributions)
          __stcs(target, y);
        else
          atomicAdd(target, y);
      }
    }
}

}  // namespace talea::sparse_attention::sm90
