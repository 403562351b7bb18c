// What: from the accumulators of few_heads.cuh, columns by heads, to the caller's rows.
// Why: a row is a head's; eight columns of eight heads change places in a warp on their way.
// Never: writes a row or column beyond the problem's.
#pragma once

#include "device/sm90/transpose.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

// A quad of lanes then has 16 bytes of a head's row four times, and each lane writes one of them.
template <bool kF16, int kBlocks>
__device__ inline void store_head_words(const View& to, const Work& w, int first, int left,
                                        int thread, const float (&o)[kBlocks][8]) {
  const int lane = thread % 32, l = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < kBlocks; i += 2) {
      uint32_t piece[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 4 * n + j % 2 * 2;
        piece[j] =
            talea::sm90::transpose_matrix(packed<kF16>(o[i + j / 2][at], o[i + j / 2][at + 1]));
      }
      exchange(piece, l);
      const int h = 8 * n + lane / 4, column = (i + l / 2) * 64 + thread / 32 * 16 + l % 2 * 8;
      if (h >= w.heads || column >= left) continue;
      auto* row = static_cast<uint16_t*>(to.data) + cuda::offset(to, w.b, w.s, w.head + h);
      *reinterpret_cast<uint4*>(row + first + column) =
          make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
}

template <typename T, int kBlocks, typename F>
__device__ inline void store_head_elements(const View& to, const Work& w, int first, int left,
                                           int thread, const float (&o)[kBlocks][8], F&& form) {
  const int lane = thread % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int h = k / 2 * 8 + lane % 4 * 2 + k % 2;
    if (h >= w.heads) continue;
    T* row = static_cast<T*>(to.data) + cuda::offset(to, w.b, w.s, w.head + h) + first;
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) {
      const int column = j / 2 * 64 + thread / 32 * 16 + j % 2 * 8 + lane / 4;
      if (column < left) row[column] = form(o[j / 2][k / 2 * 4 + j % 2 * 2 + k % 2]);
    }
  }
}

// Columns from `first` on, `left` of which are the caller's. thread: of the warpgroup.
template <bool kF16, int kBlocks>
__device__ inline void store_heads(const View& to, bool words, const Work& w, int first, int left,
                                   int thread, const float (&o)[kBlocks][8]) {
  if (words)
    store_head_words<kF16>(to, w, first, left, thread, o);
  else if (to.dtype == DType::f32)
    store_head_elements<float>(to, w, first, left, thread, o, [](float x) { return x; });
  else
    store_head_elements<uint16_t>(to, w, first, left, thread, o,
                                  [](float x) { return bits_16<kF16>(x); });
}

}  // namespace talea::sparse_attention::sm90
