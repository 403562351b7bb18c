// What: from accumulators to the caller's rows: 16-byte words where rows lie on them.
// Why: a quad of lanes holds 4-byte pieces of a row; exchanged, each lane writes 16 bytes.
// Never: writes a row or column beyond the problem's.
#pragma once

#include "ops/sparse_attention/sm90/rows.cuh"
#include "ops/sparse_attention/sm90/work.cuh"

namespace talea::sparse_attention::sm90 {

template <bool kF16>
__device__ inline float rounded_16(float x) {
  if constexpr (kF16)
    return __half2float(__float2half_rn(x));
  else
    return __bfloat162float(__float2bfloat16_rn(x));
}

template <bool kF16>
__device__ inline uint16_t bits_16(float x) {
  if constexpr (kF16)
    return __half_as_ushort(__float2half_rn(x));
  else
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Lane l of a quad holds piece l of blocks 0..3; afterwards all four pieces of block l.
__device__ inline void exchange(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? w[j] : w[j + 1], 1);
    (lane & 1 ? w[j] : w[j + 1]) = other;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t other = __shfl_xor_sync(~0u, lane & 2 ? w[j] : w[j + 2], 2);
    (lane & 2 ? w[j] : w[j + 2]) = other;
  }
}

// The columns of a warpgroup in a row: `left` of them from the first on are the caller's.
struct Where {
  int64_t begin = 0;  // element of the first
  int left = 0;       // 0: the row is not the caller's
};

// o: accumulators of m64 x kHalf; row i, of two, of a thread.
template <int kHalf, bool kF16>
__device__ inline void store_words(const View& to, const Where& at, int i,
                                   const float (&o)[kHalf / 2]) {
  const int lane = threadIdx.x % 4;
  auto* row = static_cast<uint16_t*>(to.data) + at.begin + lane * 8;
#pragma unroll
  for (int n = 0; n < kHalf / 8; n += 4) {
    uint32_t piece[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      piece[j] = packed<kF16>(o[4 * (n + j) + 2 * i], o[4 * (n + j) + 2 * i + 1]);
    exchange(piece, lane);
    if ((n + lane) * 8 < at.left)
      *reinterpret_cast<uint4*>(row + n * 8) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
  }
}

// Narrow pieces: a lane's own 4 bytes.
template <int kHalf, bool kF16>
__device__ inline void store_pairs(const View& to, const Where& at, int i,
                                   const float (&o)[kHalf / 2]) {
  const int first = threadIdx.x % 4 * 2;
  auto* row = static_cast<uint16_t*>(to.data) + at.begin + first;
#pragma unroll
  for (int n = 0; n < kHalf / 8; ++n)
    if (n * 8 + first < at.left)
      *reinterpret_cast<uint32_t*>(row + n * 8) =
          packed<kF16>(o[4 * n + 2 * i], o[4 * n + 2 * i + 1]);
}

template <int kHalf, typename T, typename F>
__device__ inline void store_elements(const View& to, const Where& at, int i,
                                      const float (&o)[kHalf / 2], F&& form) {
  const int first = threadIdx.x % 4 * 2;
  T* row = static_cast<T*>(to.data) + at.begin + first;
#pragma unroll
  for (int n = 0; n < kHalf / 8; ++n) {
    if (n * 8 + first >= at.left) continue;  // columns end on pairs
    row[n * 8] = form(o[4 * n + 2 * i]);
    row[n * 8 + 1] = form(o[4 * n + 2 * i + 1]);
  }
}

template <int kHalf, bool kF16>
__device__ inline void store_rows(const View& to, bool words, const float (&o)[kHalf / 2],
                                  const Where (&at)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (words) {
      if constexpr (kHalf < 32)
        store_pairs<kHalf, kF16>(to, at[i], i, o);
      else
        store_words<kHalf, kF16>(to, at[i], i, o);
    } else if (to.dtype == DType::f32) {
      store_elements<kHalf, float>(to, at[i], i, o, [](float x) { return x; });
    } else {
      store_elements<kHalf, uint16_t>(to, at[i], i, o, [](float x) { return bits_16<kF16>(x); });
    }
}

}  // namespace talea::sparse_attention::sm90
