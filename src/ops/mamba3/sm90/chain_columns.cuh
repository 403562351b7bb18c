// What: a state that a walk holds: by pairs of columns, transposed, in the registers of two warpgroups.
// Why: columns of a pair turn together, and rows of a left operand are a warp's own.
// Never: adds to it.
#pragma once

#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {

// A state [P, N] by pairs of columns, transposed: warpgroup g has pairs 32 g and on, a warp eight
// of them, a lane the two columns of one; element 4 j + i has value 8 j + 2 (lane % 4) + i % 2, of
// the first column or, from i = 2 on, of the second.
template <bool halves>
struct Columns {
  int pair = threadIdx.x / 32 * 8 + (threadIdx.x & 31) / 4;
  int value = (threadIdx.x & 3) * 2;
  __device__ __forceinline__ int first() const { return halves ? pair : 2 * pair; }
  __device__ __forceinline__ int second() const { return halves ? pair + 64 : 2 * pair + 1; }

  __device__ __forceinline__ void take(const float* from, float (&h)[32]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const row = from + (8 * j + value + i) * columns;
        if constexpr (halves) {
          h[4 * j + i] = row[first()], h[4 * j + i + 2] = row[second()];
        } else {
          const float2 both = *reinterpret_cast<const float2*>(row + first());
          h[4 * j + i] = both.x, h[4 * j + i + 2] = both.y;
        }
      }
  }
  __device__ __forceinline__ void put(float* to, const float (&h)[32]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const row = to + (8 * j + value + i) * columns;
        if constexpr (halves)
          row[first()] = h[4 * j + i], row[second()] = h[4 * j + i + 2];
        else
          *reinterpret_cast<float2*>(row + first()) = {h[4 * j + i], h[4 * j + i + 2]};
      }
  }
  // Where the lane's columns begin in a tile of 64 rows of 128 columns: by matrices of eight rows,
  // first columns, second ones, and both eight rows on; or the two of one row.
  __device__ __forceinline__ int place() const {
    const int lane = threadIdx.x & 31;
    if (halves) return place_of(lane % 8 + lane / 16 * 8, pair / 8 * 8 + (lane & 8 ? 64 : 0));
    return place_of(value, first());
  }
  // Rounded, into such a tile, of which a warp writes its own columns alone. place: place().
  __device__ __forceinline__ void put_rounded(char* tile, int place, const float (&h)[32]) const {
    if constexpr (halves) {
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        hopper::store_matrix_x4_transposed(
            tile + place + j * 1024, two_rounded(h[4 * j], h[4 * j + 1]),
            two_rounded(h[4 * j + 2], h[4 * j + 3]), two_rounded(h[4 * j + 4], h[4 * j + 5]),
            two_rounded(h[4 * j + 6], h[4 * j + 7]));
    } else {
      const int odd = row_behind(place, 1);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<uint32_t*>(tile + (i ? odd : place) + j * 1024) =
              two_rounded(h[4 * j + i], h[4 * j + i + 2]);
    }
  }
};

}  // namespace talea::mamba3::sm90
