// What: what the warpgroups of backward share: operands and sums of a chunk, what is read ahead.
// Why: every part of backward reads and writes it by name.
// Never: outlives the heads of a block.
#pragma once

#include "ops/mamba3/sm90/gate.cuh"
#include "ops/mamba3/sm90/handed_chunk.cuh"
#include "ops/mamba3/sm90/token.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int back_threads = 512;

// Where a block works.
struct Place {
  int64_t sequence = 0, chunk = 0;  // of the wave, of the unit
  int64_t in_segment = 0, in_slice = 0;
  int group = 0, part = 0, first = 0, last = 0;  // heads [first, last), counted by units
};

// Of the block, but for its heads. Parts of a group lie beside each other: they read the same rows.
__device__ __forceinline__ Place place_of_block(const Args& a, const UnitBuffers& b,
                                                const Wave& wave) {
  int64_t number = blockIdx.x;
  Place place;
  place.part = static_cast<int>(number % b.parts), number /= b.parts;
  place.group = static_cast<int>(number % a.size.groups), number /= a.size.groups;
  place.in_slice = number % wave.slice_chunks;
  place.in_segment = wave.slice + place.in_slice;
  place.sequence = number / wave.slice_chunks;
  place.chunk = wave.segment * a.size.segment + place.in_segment;
  return place;
}

// The heads of its part of its group: some or none where ranks share the group.
__device__ __forceinline__ void put_heads(const Args& a, const Cut& cut, const UnitBuffers& b,
                                          Place& place) {
  const cuda::Sizes& s = a.size;
  const int each = (s.heads_per_group + b.parts - 1) / b.parts;
  const int begin = place.group * s.heads_per_group - s.head_offset,
            end = begin + s.heads_per_group;
  const int first = begin + place.part * each, last = first + each < end ? first + each : end;
  place.first = (first > 0 ? first : 0) << cut.bits();
  place.last = (last < cut.heads_of(s) ? last : cut.heads_of(s)) << cut.bits();
  if (mutant(ScanMutant::m3_head_of_the_next_group) && first + each <= cut.heads_of(s))
    place.last = (first + each) << cut.bits();
}

// Unit and tokens of the chunk at `place`, which a round of a pack numbers among all of its pack.
template <int C>
__device__ __forceinline__ void put_chunk(const Args& a, const Cut& cut, const Wave& w,
                                          Place& place, Unit& unit, Part& part) {
  if (!a.pack.rounds) {
    unit = cuda::unit_of(a, w.first + place.sequence, cut.head_of(place.first));
    put_number(cut, place.first, unit);
    part = part_of<C>(unit, place.chunk);
    return;
  }
  const RoundAt round(a, w.segment);
  place.chunk = round.first + place.in_segment;
  part = {};
  if (place.chunk >= round.end) return;
  const cuda::PackedChunk x = a.pack.chunks[place.chunk];
  unit = cuda::unit_of(a, x, cut.head_of(place.first));
  put_number(cut, place.first, unit);
  part = part_of<C>(unit, x.chunk);
}

// States that a head has of the segment at work, and the place of the chunk's among them: of a pack
// whose states are handed each stretch has one more behind its chunks.
template <bool handed>
__device__ __forceinline__ int64_t states_of_head(const Args& a) {
  return a.size.segment + (handed && a.pack.rounds ? a.pack.abreast : 1);
}
template <bool handed>
__device__ __forceinline__ int64_t state_of_chunk(const Args& a, const UnitBuffers& b,
                                                  const Place& place) {
  return place.in_segment + (handed && a.pack.rounds ? b.ordinals[place.chunk] : 0);
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

template <int R, int blocks>
struct BackShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks, apart = pairs + 4;
  // Lanes of a warp whose rows have the same r: their sums are one.
  static constexpr int alike = 8 / R, lanes = 128 / alike;
  // With eight rows a token some sums lie where products no longer read.
  static constexpr bool has_room = R < 8;
  char q[wide_bytes], k[wide_bytes], h[wide_bytes], e[wide_bytes];
  char v[panel_bytes], d_y[panel_bytes];
  char seen[panel_bytes], weights[panel_bytes];  // queries and keys weighed, dO V^T weighed
  float4 sums_q[16 * 128], sums_k[16 * 128];     // over the heads, as accumulators lie
  float2 turns[C * apart];                       // cos, sin
  // Sums over the chunk, of the lanes of a group: rows of q and k, values, z, out.
  float rows_q[32 * lanes], rows_k[32 * lanes];
  float by_v[16 * lanes], own_z[has_room ? 16 * lanes : 4], own_out[has_room ? 16 * lanes : 4];
  float4 q_bias[R * 32], k_bias[R * 32];
  float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
  float skip, unused[3];
  ChunkSteps<C> steps[2];  // of heads in turn
  float dots_q[rows], dots_k[rows], by_state[rows], by_same[rows];
  float by_later[4][C];                 // of each warp
  alignas(16) float torque[16][pairs];  // the same, of Hout and E
  float torques[pairs];                 // of all warps
  float ends[back_threads];
  double energy[16], traces[4];
  float by_rate[blocks][C], of_step[C];
  Unit unit;  // of the first head
  Homes homes;
  Buffers from;
  Place place;
  Part part;

  // Turns of a token and pair by queries and by keys, where products no longer read.
  __device__ __forceinline__ float* turn_q() { return reinterpret_cast<float*>(seen); }
  __device__ __forceinline__ float* turn_k() { return reinterpret_cast<float*>(h); }
  static __device__ __forceinline__ int turn_at(int t, int pair) {
    return t * pairs + (pair ^ ((t & 7) << 2));
  }
  static_assert(C * pairs * 4 <= 2 * panel_bytes);
  __device__ __forceinline__ float* by_z() {
    return has_room ? own_z : reinterpret_cast<float*>(weights);
  }
  __device__ __forceinline__ float* by_out() {
    return has_room ? own_out : reinterpret_cast<float*>(h + panel_bytes);
  }
  static_assert(has_room || (C * pairs * 4 <= panel_bytes && 16 * lanes * 4 <= panel_bytes));
};
template <int R, int blocks>
struct UnitShared : BackShared<R, blocks> {
  float d_d[16];  // of each warp
};

// What a thread has read of a head before its rows are at work.
template <int R, int blocks>
struct Ahead {
  RawValues<R, back_threads> own;
  GatedRow<R> gated;
  uint4 behind[2] = {};  // of Hout
  __device__ __forceinline__ Ahead() : own(threadIdx.x) {}
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
__device__ __forceinline__ float over_eight(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
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
  return x[0];  // R 8: each lane has its own
}

// Sums of lanes with the same r, 4 R of a warp for each slot: with R of 2 and up those of its four
// warps so swapped that slots which a warp has together meet no bank twice.
template <int R>
__device__ __forceinline__ int alike_at(int slot, int warp, int lane) {
  if constexpr (R == 1) return (slot * 4 + warp) * 4 + lane;
  return (slot * 4 + (warp ^ slot % (8 / R))) * (4 * R) + lane;
}
// Of neighbouring slots, by a warpgroup.
template <int R>
__device__ __forceinline__ void put_alike(float* sums, int slot, float (&x)[8 / R]) {
  const float sum = shared_by_alike<R>(x);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  sums[alike_at<R>(slot + lane / (4 * R), warp, lane % (4 * R))] = sum;
}
// Over the warps: item i is lane i % (4 R) of slot i / (4 R).
template <int R>
__device__ __forceinline__ float sum_alike(const float* sums, int i) {
  const auto of = [&](int warp) { return sums[alike_at<R>(i / (4 * R), warp, i % (4 * R))]; };
  return ((of(0) + of(1)) + of(2)) + of(3);
}

}  // namespace talea::mamba3::sm90
