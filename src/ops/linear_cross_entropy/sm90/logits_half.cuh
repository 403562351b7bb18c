// What: the epilogue of the logits product in fp16: exp(z - shift), less a power of two where that
// would be too large, and the sums of every row.
// Why: fp16 ends at 65504. The first words say where a row's maximum lies, give or take: a tile
// that rises above it keeps its row's terms smaller by a power of two of its own, and the rows
// that have such tiles are evened out before the gradient products read them (half.cu).
// Never: rounds a term twice, but where it becomes subnormal.
//
//   a warp, 16 rows of the tile at a time; z in log2 units, target and columns past the end -inf:
//     peak = max over the tile of z - shift[row];  raise = what it exceeds kHalfReach2 by, up
//     buffer [rows, vocab] = exp2(z - shift[row] - raise) in fp16, by TMA
//     tile_sums [tile, row] = their sum 2^raise;  tile_raises [tile, row] = raise
#pragma once
#include "ops/linear_cross_entropy/sm90/logits.cuh"
#include "ops/linear_cross_entropy/sm90/pack.cuh"

namespace talea::lce::sm90 {

struct HalfLogitsEpilogue : LogitsEpilogue<LogitsMode::store, false, false> {
  // Of a row of the tile, as the product left it: the scale is positive.
  template <class S>
  static __device__ __forceinline__ float largest(const float (&acc)[S::kBlockN / 2], int half) {
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < S::kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& m = most[j % 2 * 2 + e];
        m = fmaxf(m, acc[4 * j + 2 * half + e]);
      }
    float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    for (int step = 1; step <= 2; step *= 2)
      all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, step));
    return all;
  }

  template <class S>
  static __device__ __forceinline__ int raise(const float (&acc)[S::kBlockN / 2], Row& r,
                                              int half) {
    r.peak = fmaf(largest<S>(acc, half), r.scale, -r.shift);
    const int by = raise_of(r.peak);
    r.shift += static_cast<float>(by);
    return by;
  }

  static __device__ __forceinline__ float term(Row& r, float acc) {
    const float e = exp2_fast(fmaf(acc, r.scale, -r.shift));
    r.sum += e;
    return e;
  }

  // 64 columns of the warp's 16 rows.
  static __device__ __forceinline__ void group(const float* acc, const Params& p, Row& upper,
                                               Row& lower, int row, int column, char* staging) {
    uint32_t packed[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float* a = acc + 4 * j;
      const float u0 = term(upper, a[0]), u1 = term(upper, a[1]);
      const float l0 = term(lower, a[2]), l1 = term(lower, a[3]);
      packed[2 * j] = lce::pack<true>(u0, u1), packed[2 * j + 1] = lce::pack<true>(l0, l1);
    }
    store_piece(p.exp_map, packed, staging, column, row);
  }

  static __device__ __forceinline__ void finish(const Params& p, Row& r, int by, int row, int rows,
                                                int tile) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) r.sum += __shfl_xor_sync(0xffffffffu, r.sum, step);
    if (threadIdx.x % 4 != 0 || row >= rows) return;
    p.tile_sums[p.places.at(tile, row, rows)] = r.sum * power_of_two(by);
    p.tile_raises[tile * p.raise_stride + row] = static_cast<uint8_t>(by);
    if (!p.repair && r.peak > kReach2)
      atomicMax(&p.rows.peak[row], encode_peak(r.peak + (r.shift - static_cast<float>(by))));
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = first_row + 64 * part, own = row + static_cast<int>(threadIdx.x) % 32 / 4;
      Row upper = begin<S>(p, own, work.rows, column);
      Row lower = begin<S>(p, own + 8, work.rows, column);
      if (static_cast<unsigned>(upper.target) < S::kBlockN)
        take_target<S>(acc[part], p, upper, 0, own, column);
      if (static_cast<unsigned>(lower.target) < S::kBlockN)
        take_target<S>(acc[part], p, lower, 1, own + 8, column);
      if (column + S::kBlockN > p.vocab) mask_columns<S>(acc[part], p.vocab - column);
      __syncwarp();
      const int up = raise<S>(acc[part], upper, 0), low = raise<S>(acc[part], lower, 1);
#pragma unroll
      for (int g = 0; g < S::kBlockN / 64; ++g)
        group(&acc[part][32 * g], p, upper, lower, row, column + 64 * g, staging);
      finish(p, upper, up, own, work.rows, column / S::kBlockN);
      finish(p, lower, low, own + 8, work.rows, column / S::kBlockN);
    }
  }
};

}  // namespace talea::lce::sm90
