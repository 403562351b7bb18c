// What: the epilogue that leaves the fp32 accumulators of the logits product in a buffer.
// Why: some options need every logit once its row is known.
// Never: scales, adds a bias or rounds: the passes over the buffer do.
#pragma once
#include "device/sm90/gemm.cuh"

namespace talea::lce::sm90 {

using namespace talea::sm90;

struct WideLogitsParams {
  CUtensorMap map;  // [rows, vocab] fp32
  int vocab = 0;
};

struct WideLogitsEpilogue : WaitsFirst {
  using Params = WideLogitsParams;
  using Filter = EveryTile;

  // 32 columns of the warp's 16 rows, through shared memory to TMA.
  static __device__ __forceinline__ void group(const float* acc, const Params& p, int row,
                                               int column, char* staging) {
    const int lane = threadIdx.x % 32, own = lane / 4;
    if (lane == 0) store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* a = acc + 4 * j;
      const int at = own * 128 + (((2 * j + lane % 4 / 2) ^ own) * 16) + 8 * (lane % 2);
      *reinterpret_cast<float2*>(staging + at) = {a[0], a[1]};
      *reinterpret_cast<float2*>(staging + 1024 + at) = {a[2], a[3]};
    }
    fence_async_shared();
    __syncwarp();
    if (lane != 0) return;
    store_tile(&p.map, staging, column, row);
    store_commit();
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>&, int first_row, int column,
                                             char* staging) {
#pragma unroll
    for (int part = 0; part < S::kParts; ++part)
#pragma unroll
      for (int g = 0; g < S::kBlockN / 32; ++g)
        if (column + 32 * g < p.vocab)
          group(&acc[part][16 * g], p, first_row + 64 * part, column + 32 * g, staging);
  }
};

}  // namespace talea::lce::sm90
