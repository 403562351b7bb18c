// What: dkv of 64 keys and columns, from the accumulators of a warpgroup to the rows of its keys.
// Why: lines of 128 bytes: what adds them up is bound by their number.
// Never: writes a row that no valid slot names.
#pragma once

#include "device/sm90/ptx.cuh"
#include "ops/sparse_attention/sm90/backward_tile.hpp"

namespace talea::sparse_attention::sm90 {

// A quad of lanes has eight pieces of 32 bytes of a row. First neighbours exchange, so that each
// lane has 16 bytes in a row of every second piece; then quads, so that eight lanes have 128
// bytes of a row: instruction `turn` writes the rows of even or odd quads.
//
// Where a thread writes, [row, row + 8 of its warp][turn]: its place in the lines of a chunk of
// columns. Of its own row it keeps the first half of a line.
struct Lines {
  float* at[2][2];
  unsigned there = 0;  // bit 2 e + turn: whether the row is somebody's
  bool all;            // those of this warp's threads are

  // rows: where each of the tile's keys has its row, -1: nobody's.
  __device__ Lines(float* base, const int64_t* rows, int thread) {
    const int lane = thread % 32, quad = lane / 4 % 2;
    const int place = lane % 2 * 8 + lane / 2 % 2 * 4;
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int line = thread / 32 * 16 + lane / 8 * 2 + turn + 8 * e;
        const int64_t row = *const_cast<const volatile int64_t*>(rows + line);
        there |= (row >= 0 ? 1u : 0u) << (2 * e + turn);
        at[e][turn] = base + row + place + (turn == quad ? 0 : 16);
      }
    all = __all_sync(~0u, there == 15);
  }
  __device__ void move(int columns) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) at[e][turn] += columns;
  }
};

// Half a chunk, 32 columns from `at` on. left: columns of the chunk that are the problem's. kAll:
// all of them, and all rows. kStores: contributions, which no other thread adds to. kGrows: x times
// `grown`.
template <bool kStores, bool kGrows, bool kAll>
__device__ inline void give_line(const Lines& lines, const float (&x)[16], int at, float grown,
                                 int left) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = lane % 2 != 0, second = lane / 4 % 2 != 0;
  float piece[2][2][4];  // [row][of the blocks 0, 1; 2, 3]
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int i = 8 * k + 2 * e + j;
        const float even = kGrows ? x[i] * grown : x[i];
        const float next = kGrows ? x[i + 4] * grown : x[i + 4];
        const float kept = odd ? next : even;
        const float other = __shfl_xor_sync(~0u, odd ? even : next, 1);
        piece[e][k][j] = odd ? other : kept;
        piece[e][k][j + 2] = odd ? kept : other;
      }
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int j = 0; j < 4; ++j) piece[e][1][j] = __shfl_xor_sync(~0u, piece[e][1][j], 4);
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const bool mine = turn == 1 ? second : !second;
      const float(&own)[4] = piece[e][0], (&other)[4] = piece[e][1];
      float4 y;
      y.x = mine ? own[0] : other[0], y.y = mine ? own[1] : other[1];
      y.z = mine ? own[2] : other[2], y.w = mine ? own[3] : other[3];
      if constexpr (!kAll) {
        const int column = at + lane % 2 * 8 + lane / 2 % 2 * 4 + (mine ? 0 : 16);
        if (!(lines.there >> (2 * e + turn) & 1) || column >= left) continue;
      }
      auto* target = reinterpret_cast<float4*>(lines.at[e][turn] + at);
      if constexpr (kStores)
        __stcs(target, y);
      else
        atomicAdd(target, y);
    }
}
template <bool kStores, bool kGrows>
__device__ inline void give(const Lines& lines, const float (&x)[32], float grown, int left) {
  const float(&low)[16] = reinterpret_cast<const float(&)[16]>(x[0]);
  const float(&high)[16] = reinterpret_cast<const float(&)[16]>(x[16]);
  if (lines.all && left >= chunk_columns) {
    give_line<kStores, kGrows, true>(lines, low, 0, grown, left);
    give_line<kStores, kGrows, true>(lines, high, 32, grown, left);
  } else {
    give_line<kStores, kGrows, false>(lines, low, 0, grown, left);
    give_line<kStores, kGrows, false>(lines, high, 32, grown, left);
  }
}

}  // namespace talea::sparse_attention::sm90
