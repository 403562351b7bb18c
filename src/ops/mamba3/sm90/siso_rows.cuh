// What: rows of one row a token: copied, weighed and seen with places known ahead.
// Why: a kernel that issues most of the time gains by each instruction that it need not.
// Never: copies rows of a chunk that its sequence ends within.
#pragma once

#include "ops/mamba3/sm90/state.cuh"

namespace talea::mamba3::sm90 {

// The first rows of a unit.
struct RowHomes {
  const __nv_bfloat16 *q = nullptr, *k = nullptr, *v = nullptr;
  __device__ __forceinline__ void set(const Args& a, const Unit& u) {
    const auto of = [](const View& from, int64_t at) {
      return static_cast<const __nv_bfloat16*>(from.data) + at;
    };
    q = of(a.q, cuda::at(a.q, u.batch, u.begin, 0, u.group));
    k = of(a.k, cuda::at(a.k, u.batch, u.begin, 0, u.group));
    v = of(a.v, cuda::at(a.v, u.batch, u.begin, u.head));
  }
};

// All rows of `width` columns from row `first` behind `home` on, as copy_rows has them.
template <int width, int threads>
__device__ __forceinline__ void copy_whole(const __nv_bfloat16* home, int64_t stride, int64_t first,
                                           char* tile, int thread) {
  constexpr int pieces = width / 8, apart = threads / pieces;
  const int piece = thread % pieces, row0 = thread / pieces;
  const uint32_t to = hopper::smem_address(tile) + static_cast<uint32_t>(place_of(row0, piece * 8));
  const auto* at = home + (first + row0) * stride + piece * 8;
#pragma unroll
  for (int i = 0; i < rows / apart; ++i) {
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * apart * 128), at, true);
    at += stride * apart;
  }
}

// As RawValues puts them, of values that nothing projects: they stay as they are, zeros behind the
// last token, whose key is 0.
template <int threads>
__device__ __forceinline__ void weigh_values(const char* plain, const float* key, char* weighed,
                                             int thread) {
  constexpr int apart = threads / 8;
  const int t = thread >> 3, at = place_of(t, (thread & 7) * 8);
#pragma unroll
  for (int i = 0; i < rows / apart; ++i) {
    const auto raw = *reinterpret_cast<const uint4*>(plain + at + i * apart * 128);
    const float by = key[t + i * apart];
    const auto scaled = [&](uint32_t x) { return two_rounded(by * low_of(x), by * high_of(x)); };
    *reinterpret_cast<uint4*>(weighed + at + i * apart * 128) = {scaled(raw.x), scaled(raw.y),
                                                                 scaled(raw.z), scaled(raw.w)};
  }
}

// Q K^T weighed: f(j, second, x, y) of the two neighbours of column group j, of the first row or of
// the second. Without a look where every token of a group of columns is earlier than the warp's
// own. A row behind the last token is weighed as if it were one: none stores it.
template <class Steps, class F>
__device__ __forceinline__ void weigh_tokens(const float (&scores)[32], const Steps& steps, int n,
                                             F f) {
  const int row = own_row(), column = own_column();
  const int top = row - (threadIdx.x & 31) / 4;  // the warp's first row
  const float4 own[2] = {steps.pair[row], steps.pair[row + 8]};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float x[2][2] = {{0, 0}, {0, 0}};
    if (8 * j < top) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 key = steps.pair[column + 8 * j + e];
#pragma unroll
        for (int second = 0; second < 2; ++second)
          x[second][e] = key.z * decay_of(own[second], key) * scores[4 * j + 2 * second + e];
      }
    } else if (8 * j <= top + 15) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int earlier = column + 8 * j + e;
        const float4 key = steps.pair[earlier];
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const int t = row + 8 * second;
          float by = 0;
          if (t > earlier && t < n)
            by = key.z * decay_of(own[second], key);
          else if (t == earlier)
            by = key.w;
          // Not 0 * Inf: what is not seen is not multiplied.
          x[second][e] = t >= earlier ? by * scores[4 * j + 2 * second + e] : 0.0f;
        }
      }
    }
    f(j, 0, x[0][0], x[0][1]);
    f(j, 1, x[1][0], x[1][1]);
  }
}

}  // namespace talea::mamba3::sm90
