// What: what the warpgroups of backward share: operands and sums of a chunk.
// Why: every part of backward reads and writes it by name.
// Never: outlives the heads of a block.
#pragma once

#include "ops/mamba3/sm90/gate.cuh"
#include "ops/mamba3/sm90/token.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int back_threads = 256;

// Where a block works.
struct Place {
  int64_t sequence = 0, chunk = 0;  // of the wave, of the unit
  int64_t in_segment = 0, in_slice = 0;
  int group = 0, part = 0, first = 0, last = 0;  // heads [first, last)
};

// Unit and tokens of the chunk at `place`, which a round of a pack numbers among all of its pack.
template <int C>
__device__ __forceinline__ void put_chunk(const Args& a, const Wave& w, Place& place, Unit& unit,
                                          Part& part) {
  if (!a.pack.rounds) {
    unit = cuda::unit_of(a, w.first + place.sequence, place.first);
    part = part_of<C>(unit, place.chunk);
    return;
  }
  const RoundAt round(a, w.segment);
  place.chunk = round.first + place.in_segment;
  part = {};
  if (place.chunk >= round.end) return;
  const cuda::PackedChunk x = a.pack.chunks[place.chunk];
  unit = cuda::unit_of(a, x, place.first);
  part = part_of<C>(unit, x.chunk);
}

// Where the tensors of head 0 of the group's tokens begin at the chunk's first one, in elements.
struct Homes {
  int64_t q = 0, k = 0, v = 0, z = 0, d_out = 0, d_v = 0, d_z = 0, angles = 0, d_angles = 0;
};

// What the chunk has of head 0 in a buffer of the workspace, and how many bytes a head is behind.
struct OfHeads {
  char* first = nullptr;
  uint32_t apart = 0;
  __device__ __forceinline__ char* of(int head) const {
    return first + static_cast<uint64_t>(static_cast<uint32_t>(head)) * apart;
  }
};
struct Buffers {
  OfHeads h, e, turns, steps, partial;
};

// Of each query's token, or each key's, and the others: what decays between them. A thread's own
// lie side by side.
template <int R>
struct Table {
  static constexpr int C = tokens_of<R>, per = 8 / R, width = C + 4;
  float of[C * width];
  static __device__ __forceinline__ int place(int row, int c) {
    return row * width + c % per * 8 + c / per;
  }
};

template <int R, int blocks>
struct BackShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  // Lanes of a warp whose rows have the same r: their sums are one.
  static constexpr int alike = 8 / R, lanes = 128 / alike;
  static constexpr int parameters = R * (2 * columns + 3 * values) + 4;
  char q[wide_bytes], k[wide_bytes], h[wide_bytes], e[wide_bytes];
  char v[panel_bytes], d_y[panel_bytes];  // then sums of rows of k and q over the chunk
  float2 turns[C * pairs];                // cos, sin
  // Of a head as launch_parameters has written them.
  float4 q_bias[R * 32], k_bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  float skip, unused[3];
  ChunkSteps<C> steps[2];  // of heads in turn
  // Of the queries and of the keys; neither writes where the other still reads.
  union alignas(16) {
    Table<R> table;
    float torques[C * pairs];  // once it has been read
  } of_group[2];
  // Sums over the chunk, of the lanes of a group: of v, z and out.
  alignas(16) float by_value[3][16 * lanes];
  float ends[back_threads];
  float of_query[C], of_step[C], by_same[C];  // of tokens
  float by_rate[blocks][C];
  alignas(16) float torque[4][pairs];  // of Hout and E, by warps
  double energy[8], traces[4];
  Unit unit;  // of the first head
  Homes homes;
  Buffers from;
  float *sums_q, *sums_k;  // of the chunk's first row, or nowhere
  Place place;
  Part part;

  // Where a pair of a token lies, so that eight rows meet no bank twice.
  static __device__ __forceinline__ int turn_at(int t, int pair) {
    return t * pairs + (pair ^ ((t & 7) << 2));
  }
};

// Rows of an output whose columns lie side by side, from two neighbours of a thread on.
struct OutRows {
  char* at[2] = {};  // of the thread's two rows
  bool live[2] = {}, rounds = false;
  // c: columns behind the first ones.
  __device__ __forceinline__ void store(int second, int c, float x, float y) const {
    if (!live[second]) return;
    if (rounds)
      *reinterpret_cast<uint32_t*>(at[second] + 2 * c) = two_rounded(x, y);
    else
      *reinterpret_cast<float2*>(at[second] + 4 * c) = {x, y};
  }
};

// Over the R rows of a token, which lie R lanes of eight apart.
template <int R>
__device__ __forceinline__ float over_ranks(float x) {
#pragma unroll
  for (int step = 4; step < 4 * R; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Over the 8 / R lanes of a warp whose rows have the same r, of as many numbers: lane l is left
// with the sum of number l / 4 / R.
template <int R>
__device__ __forceinline__ float shared_by_alike(float (&x)[8 / R]) {
  if constexpr (R == 1) share<4>(x, 16), share<2>(x, 8), share<1>(x, 4);
  if constexpr (R == 2) share<2>(x, 16), share<1>(x, 8);
  if constexpr (R == 4) share<1>(x, 16);
  return x[0];
}

}  // namespace talea::mamba3::sm90
