// What: the state of a head in registers, values of a chunk as operands, sums over rows of a token.
// Why: forward, states and gradients hand a state on alike.
// Never: divides by a decay.
#pragma once

#include <type_traits>

#include "ops/mamba3/sm90/turns.cuh"

namespace talea::mamba3::sm90 {

// A state [P, N] of a warpgroup's accumulator in memory, in fp32.
__device__ __forceinline__ void put_state(float* to, float (&h)[64]) {
  each_two(h, [&](int p, int n, float x, float y) {
    *reinterpret_cast<float2*>(to + p * columns + n) = {x, y};
  });
}
__device__ __forceinline__ void take_state(const float* from, float (&h)[64]) {
  each_two(h, [&](int p, int n, float& x, float& y) {
    const float2 both = *reinterpret_cast<const float2*>(from + p * columns + n);
    x = both.x, y = both.y;
  });
}

// Two neighbours of a row of an output.
__device__ __forceinline__ void store_two(const View& v, int64_t at, float x, float y) {
  if (v.dtype == DType::bf16)
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(v.data) + at) = two_rounded(x, y);
  else
    *reinterpret_cast<float2*>(static_cast<float*>(v.data) + at) = {x, y};
}

// Rows of a tile of one row a token to an output whose columns lie side by side: neighbouring lanes
// swap, so that each has four numbers of a row, and a quad sixteen. home: the chunk's first row.
__device__ __forceinline__ void store_values(const View& to, int64_t home, int n,
                                             const float (&x)[32]) {
  const int row = (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4;
  if (to.dtype != DType::bf16) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const int t = row + 8 * second;
      float* const own =
          static_cast<float*>(to.data) + home + t * to.stride[1] + (threadIdx.x & 3) * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (t < n)
          *reinterpret_cast<float2*>(own + 8 * j) = {x[4 * j + 2 * second],
                                                     x[4 * j + 2 * second + 1]};
    }
    return;
  }
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int t = row + 8 * second;
    auto* const own = static_cast<__nv_bfloat16*>(to.data) + home + t * to.stride[1] +
                      (threadIdx.x & 2) * 2 + (odd ? 8 : 0);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int at = 4 * j + 2 * second;
      const uint32_t low = two_rounded(x[at], x[at + 1]);
      const uint32_t high = two_rounded(x[at + 4], x[at + 5]);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
      if (t < n)
        *reinterpret_cast<uint2*>(own + 8 * j) = odd ? uint2{other, high} : uint2{low, other};
    }
  }
}

// Nothing is left behind a reset, not 0 * Inf.
template <int count>
__device__ __forceinline__ void scale_state(float (&h)[count], float by) {
  if (by == 0) {
#pragma unroll
    for (float& x : h) x = 0;
  }
#pragma unroll
  for (float& x : h) x *= by;
}

// Rows of v of R = 1 as they are, the first at `home`.
template <int threads>
__device__ __forceinline__ void copy_values(const Args& a, int64_t home, const Part& p, char* tile,
                                            int thread) {
  constexpr int apart = threads / 8;
  const int piece = thread & 7, row0 = thread >> 3, n = p.n;
  const auto* base = static_cast<const __nv_bfloat16*>(a.v.data) + home + piece * 8;
  const uint32_t to = hopper::smem_address(tile) + static_cast<uint32_t>(place_of(row0, piece * 8));
#pragma unroll
  for (int i = 0; i < rows / apart; ++i) {
    const int t = row0 + i * apart;
    hopper::copy_16_bytes(to + static_cast<uint32_t>(i * apart * 128),
                          base + (t < n ? t * a.v.stride[1] : 0), t < n);
  }
}
template <int threads>
__device__ __forceinline__ void copy_values(const Args& a, const Cut& cut, const Unit& u,
                                            const Part& p, char* tile, int thread) {
  copy_values<threads>(a, cuda::at(a.v, u.batch, u.begin + p.first, u.head, first_value(cut, u)), p,
                       tile, thread);
}

// What a thread reads of v; R = 1: from the tile that copy_values has filled.
template <int R, int threads>
class RawValues {
  static constexpr int C = tokens_of<R>, items = C * 8, each = (items + threads - 1) / threads;
  // Threads beyond the items have some of the R rows each.
  static constexpr int shares = items < threads ? threads / items : 1;
  static_assert(R % shares == 0 && (each == 1 || items % threads == 0));

 public:
  __device__ __forceinline__ explicit RawValues(int thread) : thread_(thread) {}
  __device__ __forceinline__ RawValues(const Args& a, const Cut& cut, const Unit& u, const Part& p,
                                       int thread)
      : thread_(thread) {
    if constexpr (R > 1)
      load(a, cuda::at(a.v, u.batch, u.begin + p.first, u.head, first_value(cut, u)), p);
  }
  __device__ __forceinline__ void load(const Args& a, int64_t home, const Part& p) {
    if constexpr (R > 1) {
      const auto* base = static_cast<const __nv_bfloat16*>(a.v.data) + home;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int item = item_of(i), t = item >> 3;
        raw_[i] = {0, 0, 0, 0};
        if (t < p.n)
          raw_[i] =
              __ldg(reinterpret_cast<const uint4*>(base + t * a.v.stride[1] + (item & 7) * 8));
      }
    }
  }

  // Projected rows into `plain` and, by key of each token, into `weighed`; either may be null.
  __device__ __forceinline__ void put(const Part& p, const float* mimo_v, const float* key,
                                      char* plain, char* weighed) const {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int item = item_of(i), t = item >> 3, c = (item & 7) * 8;
      uint4 raw;
      if constexpr (R == 1)
        raw = *reinterpret_cast<const uint4*>(plain + place_of(t, c));
      else
        raw = raw_[i];
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      const float by = key ? key[t] : 0.0f;
#pragma unroll
      for (int share = 0; share < R; share += shares) {
        const int r = share + (shares > 1 ? thread_ / items : 0);
        uint32_t own[4] = {0, 0, 0, 0}, scaled[4] = {0, 0, 0, 0};
        if (t < p.n) {
          const float* const own_v = mimo_v + projection_at(r, c);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 project = *reinterpret_cast<const float2*>(own_v + 2 * w);
            const float x = low_of(words[w]) * project.x, y = high_of(words[w]) * project.y;
            own[w] = two_rounded(x, y);
            scaled[w] = two_rounded(by * x, by * y);
          }
        }
        const int at = place_of(t * R + r, c);
        if (plain) *reinterpret_cast<uint4*>(plain + at) = {own[0], own[1], own[2], own[3]};
        if (weighed)
          *reinterpret_cast<uint4*>(weighed + at) = {scaled[0], scaled[1], scaled[2], scaled[3]};
      }
    }
  }

 private:
  __device__ __forceinline__ int item_of(int i) const {
    return shares > 1 ? thread_ % items : thread_ + i * threads;
  }
  int thread_;
  uint4 raw_[R > 1 ? each : 1] = {};
};

// One step of a sum over two halves of the lanes, of which each goes on with half of the numbers.
template <int half, int count>
__device__ __forceinline__ void share(float (&x)[count], int step) {
  const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    const float sent = upper ? x[i] : x[i + half], kept = upper ? x[i + half] : x[i];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
  }
}
// Over the R rows of a token, of R numbers: a row r is left with the sum of number r.
template <int R>
__device__ __forceinline__ float shared_by_ranks(const float (&x)[R]) {
  if constexpr (R == 1) return x[0];
  if constexpr (R == 2) {
    float own[2] = {x[0], x[1]};
    share<1>(own, 4);
    return own[0];
  }
  if constexpr (R == 4) {
    float own[4] = {x[0], x[2], x[1], x[3]};
    share<2>(own, 4);
    share<1>(own, 8);
    return own[0];
  }
  if constexpr (R == 8) {
    float own[8] = {x[0], x[4], x[2], x[6], x[1], x[5], x[3], x[7]};
    share<4>(own, 4);
    share<2>(own, 8);
    share<1>(own, 16);
    return own[0];
  }
}

}  // namespace talea::mamba3::sm90
