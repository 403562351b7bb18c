// What: what the four warpgroups of the gradients share: operands of two heads, what they leave.
// Why: two form the operands of a head while two multiply those of the head before.
// Never: outlives the heads of a block.
#pragma once

#include "ops/mamba3/sm90/backward_shared.cuh"

namespace talea::mamba3::sm90 {

inline constexpr int gradient_threads = 512;

// ChunkSteps in two: what products are weighed by, what is read behind them.
template <int C>
struct alignas(16) StepsNear {
  float4 pair[C];  // L in two floats, s, gamma
  float left[C], key[C], right[C];
};
template <int C>
struct alignas(16) StepsLate {
  float lambda[C], other[C], dt[C], adt[C];
  float whole;
};

template <int R, int blocks>
struct GradientShared {
  static constexpr int C = tokens_of<R>, pairs = 32 * blocks;
  // Lanes of a warp whose rows have the same r: their sums are one.
  static constexpr int alike = 8 / R, lanes = 128 / alike;
  // Of what is but for a moment there is half, where eight rows a token leave no more room.
  static constexpr bool has_room = R < 8;
  // Eights of columns that are gated back where y is formed: the others go to those who form
  // operands, four each.
  static constexpr int own_gates = R == 1 ? 8 : has_room ? 0 : 4;
  static constexpr int gating = (8 - own_gates) / 4;  // warpgroups that y goes to
  static constexpr int parameters = R * (2 * columns + 3 * values) + 4;
  struct Operands {
    char q[wide_bytes], k[wide_bytes], h[wide_bytes], e[wide_bytes];
    char v[panel_bytes], d_y[panel_bytes];
  };
  // Of a head as launch_parameters has written them.
  struct Biases {
    float4 q_bias[R * 32], k_bias[R * 32];
  };
  struct alignas(16) Projections {
    float mimo_v[R * values], mimo_z[R * values], mimo_out[R * values];
    float skip, unused[3];
  };
  struct Parameters : Biases, Projections {};
  static_assert(sizeof(Parameters) == parameters * 4);
  static_assert(sizeof(StepsNear<C>) + sizeof(StepsLate<C>) == sizeof(ChunkSteps<C>));
  Operands operands[2];
  float2 turns[2][C * pairs];                  // cos, sin
  float turn_q[C * pairs], turn_k[C * pairs];  // torques by queries and by keys
  StepsNear<C> near[2];
  StepsLate<C> late[3];
  std::conditional_t<R == 1, Parameters, Projections> of_head[2];
  // Sums over the chunk, of the lanes of a warpgroup: rows; values, z and out before them.
  static constexpr int slots = has_room ? 32 : 16;  // of rows together
  float sums_q[slots * lanes], sums_k[slots * lanes];
  float y[gating > 0 ? rows* values / 2 * gating : 2];  // of the columns that others gate
  float sums_y[gating > 0 ? gating : 1][gating > 0 ? 16 * lanes : 2];  // as sums_q, of each
  float dots_q[C], dots_k[C];
  float by_same[2][C], of_step[2][C];  // of heads in turn, as all of one that is several units
  float by_rate[blocks][C];
  alignas(16) float torque[3][4][pairs];  // of Hout and E, by warps, of heads in turn
  float ends[128];
  double energy[3][4], traces[2][4];
  Unit unit;  // of the first head
  Homes homes;
  Buffers from;
  Place place;
  Part part;
  struct None {};
  std::conditional_t<R == 1, None, Biases> only_biases;

  // Where a pair of a token lies, so that eight rows meet no bank twice.
  static __device__ __forceinline__ int turn_at(int t, int pair) {
    return t * pairs + (pair ^ ((t & 7) << 2));
  }
  // Byte of y in the place of a state, in fp32.
  static __device__ __forceinline__ int y_at(int row, int column) {
    return row * 256 + (((column >> 2) ^ ((row & 7) << 1)) << 4) + (column & 3) * 4;
  }
};

// Over the lanes of a warp, of `count` numbers: lane l is left with the sum of number
// l / (32 / count).
template <int count>
__device__ __forceinline__ float shared_over_warp(float (&x)[count]) {
  static_assert(count == 2 || count == 4 || count == 8 || count == 16);
  if constexpr (count == 16) share<8>(x, 16), share<4>(x, 8), share<2>(x, 4), share<1>(x, 2);
  if constexpr (count == 8) share<4>(x, 16), share<2>(x, 8), share<1>(x, 4);
  if constexpr (count == 4) share<2>(x, 16), share<1>(x, 8);
  if constexpr (count == 2) share<1>(x, 16);
  float sum = x[0];
#pragma unroll
  for (int step = 16 / count; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

}  // namespace talea::mamba3::sm90
