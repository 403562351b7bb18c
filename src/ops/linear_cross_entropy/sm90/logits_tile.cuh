// What: a tile of logits in registers: columns past the end, words' vectors, the way to a 16-bit
// buffer.
// Why: the epilogues of the logits products share it.
// Never: computes a logit.
#pragma once
#include "device/sm90/gemm.cuh"
#include "ops/linear_cross_entropy/sm90/rows.hpp"

namespace talea::lce::sm90 {

using namespace talea::sm90;

struct LogitsTile {
  template <class S>
  static __device__ __forceinline__ void mask_columns(float (&acc)[S::kBlockN / 2], int left) {
    const int first = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < S::kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e + first >= left) acc[4 * j + e] = acc[4 * j + 2 + e] = -INFINITY;
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }

  // The values of four blocks of eight columns, read ahead of the arithmetic and not between.
  static __device__ __forceinline__ void read_words(const float* words, int vocab, int column,
                                                    float* values) {
    const int last = vocab - 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = words[min(column + 8 * (i / 2) + i % 2, last)];
  }

  // Where every column exists, `column` is even and pairs lie together.
  template <bool kMasked>
  static __device__ __forceinline__ void read(const float* words, int vocab, int column,
                                              float* values) {
    if constexpr (kMasked) return read_words(words, vocab, column, values);
    const auto* pairs = reinterpret_cast<const float2*>(words + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = pairs[4 * i];
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }

  // 64 columns of the warp's 16 rows, through shared memory to TMA.
  static __device__ __forceinline__ void store_piece(const CUtensorMap& map,
                                                     const uint32_t (&packed)[16], char* staging,
                                                     int column, int row) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) store_wait_read<0>();
    __syncwarp();
    // Lane i names row i % 16 of the 8-column blocks 2 q + i / 16; 16-byte pieces are swizzled.
    const int r = lane % 16;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int piece = (2 * q + lane / 16) ^ (r % 8);
      store_matrix_x4(staging + r * 128 + piece * 16, packed[4 * q], packed[4 * q + 1],
                      packed[4 * q + 2], packed[4 * q + 3]);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      store_tile(&map, staging, column, row);
      store_commit();
    }
  }
};

}  // namespace talea::lce::sm90
