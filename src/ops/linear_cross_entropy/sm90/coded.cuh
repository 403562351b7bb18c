// What: the epilogue of a dW product that adds to a sum in block floating point: 16-bit codes in
// dW, and an exponent for the 128 of them that a row has in a tile.
// Why: chunks add into the caller's 16-bit gradient with the digits of a longer sum.
// Never: reads a piece that another block writes.
//
//   for each of a warp's pieces [16 words, 128 columns] of the tile:
//     shared <- codes, exponents; two pieces before the product, the third once the first is out
//     sum = value(code, exponent) + accumulator
//     exponent = that of the largest sum of the row, which four lanes hold
//     dW, exponent <- shared <- code(sum, exponent); after the last chunk dW <- bf16(sum)
#pragma once
#include "ops/linear_cross_entropy/sm90/block_float.hpp"
#include "ops/linear_cross_entropy/sm90/split.cuh"

namespace talea::lce::sm90 {

struct CodedEpilogue {
  using Params = SplitParams;
  using Filter = SplitFilter;
  // Staging memory of a warp: two pieces, each of two boxes of 64 columns as TMA swizzles them.
  static constexpr int kPieces = 3, kBuffers = 2, kBox = 2048, kPiece = 2 * kBox;
  static constexpr int kStagingBytes = kBuffers * kPiece;
  // And beside it: exponents of all its pieces, those that were and those that will be; barriers.
  static constexpr int kOutAt = Rest::kWarpBytes, kBarriersAt = 2 * Rest::kWarpBytes;
  static constexpr int kAsideBytes = 128;
  static_assert(kBarriersAt + 8 * kBuffers + 4 <= kAsideBytes && kBarriersAt % 8 == 0);
  using S = Shape<192, 128, 4, true, Major::mn, Major::mn, false, kStagingBytes, kAsideBytes>;
  static_assert(S::kParts == kPieces && S::kBlockM == Rest::kTileRows &&
                S::kBlockN == Rest::kTileColumns);

  static __device__ __forceinline__ void before(const Params& p) { WaitsLast::before(p); }
  static __device__ __forceinline__ void ready(const Params&) {}
  static __device__ __forceinline__ void after(const Params& p) { WaitsLast::after(p); }

  struct Place {
    char* aside;
    uint64_t* barrier;  // one a buffer
    uint32_t* phases;   // a bit each
    __device__ __forceinline__ explicit Place(char* staging)
        : aside(aside_of<S>(staging)),
          barrier(reinterpret_cast<uint64_t*>(aside + kBarriersAt)),
          phases(reinterpret_cast<uint32_t*>(barrier + kBuffers)) {}
  };

  static __device__ __forceinline__ void start(char* staging) {
    if (threadIdx.x % 32 == 0) {
      const Place place(staging);
      for (int i = 0; i < kBuffers; ++i) barrier_init(place.barrier + i, 1);
      *place.phases = 0;
      barrier_init_fence();
    }
    __syncwarp();
  }

  static __device__ __forceinline__ char* exponents_at(const Params& p, int row, int column) {
    return p.rest + Rest::exponent_at(row, column, p.hidden);
  }

  // One lane: piece i of the tile on its way in. What lay there has gone out.
  static __device__ __forceinline__ void load(const Params& p, int first_row, int column, int i,
                                              char* staging) {
    const int row = first_row + 64 * i;
    if (row >= p.vocab) return;
    const Place place(staging);
    uint64_t* barrier = place.barrier + i % kBuffers;
    char* to = staging + i % kBuffers * kPiece;
    barrier_expect(barrier, kPiece + (i == 0 ? Rest::kWarpBytes : 0));
    load_tile(&p.dw_map, barrier, to, column, row);
    load_tile(&p.dw_map, barrier, to + kBox, column + 64, row);
    if (i == 0) load_bytes(exponents_at(p, row, column), barrier, place.aside, Rest::kWarpBytes);
  }

  template <class>
  static __device__ __forceinline__ void fetch(const Params& p, const TileOrder<S>& work,
                                               int first_row, int column, char* staging) {
    if (!p.add || (work.k_blocks == 0 && !p.ends) || threadIdx.x % 32 != 0) return;
    store_wait_read<0>();
    for (int i = 0; i < kBuffers; ++i) load(p, first_row, column, i, staging);
  }

  static __device__ __forceinline__ void await(int buffer, char* staging) {
    const Place place(staging);
    const uint32_t phases = *place.phases;
    barrier_wait(place.barrier + buffer, phases >> buffer & 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) *place.phases = phases ^ (1u << buffer);
  }

  static constexpr uint32_t kZeros = 0x80008000u;  // two codes of 0; or bf16's -0

  // How a row's block is read and written: codes or bf16, without a branch. As bf16 it is cut off.
  struct RowCodes {
    uint32_t above, lower, upper;
    float zero, unit;
    __device__ __forceinline__ explicit RowCodes(uint32_t exponent) {
      const bool bf16 = exponent == BlockFloat::kBf16;
      above = bf16 ? 0 : 0x4b000000u;  // of 2^23 + code
      lower = bf16 ? 0x1044 : 0x7610, upper = bf16 ? 0x3244 : 0x7632;
      zero = bf16 ? 0.f : BlockFloat::kZero;
      unit = bf16 ? 1.f : BlockFloat::unit(exponent);
    }
    __device__ __forceinline__ void add(float* sum, uint32_t both) const {
      sum[0] = fmaf(__uint_as_float(__byte_perm(both, above, lower)) - zero, unit, sum[0]);
      sum[1] = fmaf(__uint_as_float(__byte_perm(both, above, upper)) - zero, unit, sum[1]);
    }
  };
  struct RowWriter {
    uint32_t halves;
    float zero, scale;
    __device__ __forceinline__ explicit RowWriter(uint32_t exponent) {
      const bool bf16 = exponent == BlockFloat::kBf16;
      halves = bf16 ? 0x7632 : 0x5410;
      zero = bf16 ? 0.f : BlockFloat::kZero;
      scale = bf16 ? 1.f : BlockFloat::scale(exponent);
    }
    __device__ __forceinline__ uint32_t both(const float* sum) const {
      return __byte_perm(__float_as_uint(fmaf(sum[0], scale, zero)),
                         __float_as_uint(fmaf(sum[1], scale, zero)), halves);
    }
  };

  // Words of 16 columns of the warp's rows lie as four 8x8 matrices: eight columns of the upper and
  // the lower rows, then the next eight. Where a lane finds its row of one, of the first columns;
  // computed where it is used: kept, it would take registers that the accumulators have.
  static __device__ __forceinline__ uint32_t matrix_row(char* piece) {
    const uint32_t lane = threadIdx.x % 32, r = lane % 8;
    uint32_t at = smem_address(piece) + 1024 * (lane / 8 % 2) + 128 * r + ((lane / 16 ^ r) * 16);
    asm volatile("" : "+r"(at));
    return at;
  }
  // Of columns 16 q on, which is known when this is compiled.
  static __device__ __forceinline__ void* columns_at(uint32_t row, int q) {
    return __cvta_shared_to_generic((row ^ (q % 4 * 32)) + q / 4 * kBox);
  }

  // Columns of a box that the matrix does not have came as zeros, which are no codes of 0. inside:
  // blocks of eight columns that it has.
  static __device__ __forceinline__ void blank_outside(char* box, int inside) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 16 * 8; i += 32) {
      const int row = i / 8, block = i % 8;
      if (block >= inside)
        *reinterpret_cast<uint4*>(box + row * 128 + ((block ^ row % 8) * 16)) = {kZeros, kZeros,
                                                                                 kZeros, kZeros};
    }
    __syncwarp();
  }

  // Of a piece. acc: 64 accumulators, four a block of eight columns: two of the upper row, two of
  // the lower.
  static __device__ __forceinline__ void add_codes(float* acc, char* piece, const uint8_t* had) {
    const int own = threadIdx.x % 32 / 4;
    const RowCodes rows[2] = {RowCodes(had[own]), RowCodes(had[own + 8])};
    const uint32_t at = matrix_row(piece);
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      // Half of the words at a time: more would take registers that the accumulators have.
      if (q == 4) __syncwarp();
      uint32_t words[4];
      load_matrix_x4(words, columns_at(at, q));
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i % 2].add(acc + 8 * q + 2 * i, words[i]);
    }
  }

  template <bool kEnds>
  static __device__ __forceinline__ void write(float* acc, char* piece, uint8_t* now) {
    const int lane = threadIdx.x % 32, own = lane / 4;
    if constexpr (kEnds) {
      const uint32_t at = matrix_row(piece);
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const float* a = acc + 8 * q;
        store_matrix_x4(columns_at(at, q), pack<false>(a[0], a[1]), pack<false>(a[2], a[3]),
                        pack<false>(a[4], a[5]), pack<false>(a[6], a[7]));
      }
      return;
    }
    float most[2][2] = {};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      float& m = most[i / 2 % 2][i % 2];
      m = larger(m, acc[i]);
    }
    const uint32_t exponents[2] = {
        BlockFloat::exponent(largest_of_quad(larger(most[0][0], most[0][1]))),
        BlockFloat::exponent(largest_of_quad(larger(most[1][0], most[1][1])))};
    const RowWriter rows[2] = {RowWriter(exponents[0]), RowWriter(exponents[1])};
    const uint32_t at = matrix_row(piece);
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const float* a = acc + 8 * q;
      store_matrix_x4(columns_at(at, q), rows[0].both(a), rows[1].both(a + 2), rows[0].both(a + 4),
                      rows[1].both(a + 6));
    }
    if (lane % 4 != 0) return;
    now[own] = static_cast<uint8_t>(exponents[0]);
    now[own + 8] = static_cast<uint8_t>(exponents[1]);
  }

  template <bool kAdd, bool kEnds>
  static __device__ __forceinline__ void pieces(Accumulators<S>& acc, const Params& p,
                                                int first_row, int column, char* staging) {
    const int lane = threadIdx.x % 32, inside = (p.hidden - column) / 8;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      char* aside = Place(staging).aside;
      const int row = first_row + 64 * i;
      if (row >= p.vocab) break;
      char* piece = staging + i % kBuffers * kPiece;
      if constexpr (kAdd) {
        await(i % kBuffers, staging);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (inside < 8 * (h + 1)) blank_outside(piece + kBox * h, inside - 8 * h);
        add_codes(acc[i], piece, reinterpret_cast<uint8_t*>(aside) + 16 * i);
        if (i == 1 && lane == 0) {  // the first piece is on its way out since then
          store_wait_read<0>();
          load(p, first_row, column, 2, staging);
        }
      } else {
        if (lane == 0) i == 0 ? store_wait_read<0>() : store_wait_read<1>();
      }
      __syncwarp();
      write<kEnds>(acc[i], piece, reinterpret_cast<uint8_t*>(aside) + kOutAt + 16 * i);
      fence_async_shared();
      __syncwarp();
      if (lane != 0) continue;
      store_tile(&p.dw_map, piece, column, row);
      if (inside > 8) store_tile(&p.dw_map, piece + kBox, column + 64, row);
      store_commit();
    }
    if (kEnds || lane != 0 || first_row >= p.vocab) return;
    store_bytes(exponents_at(p, first_row, column), Place(staging).aside + kOutAt,
                Rest::kWarpBytes);
    store_commit();
  }

  template <class>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
    if (p.add && work.k_blocks == 0 && !p.ends) return;
    if (p.smooth_row) {
#pragma unroll
      for (int i = 0; i < 2 * kPieces; ++i)
        smooth_piece(acc[i / 2] + 32 * (i % 2), p, first_row + 64 * (i / 2), column + 64 * (i % 2));
    }
    if (!p.add)  // one chunk is never all
      pieces<false, false>(acc, p, first_row, column, staging);
    else if (p.ends)
      pieces<true, true>(acc, p, first_row, column, staging);
    else
      pieces<true, false>(acc, p, first_row, column, staging);
  }
};

}  // namespace talea::lce::sm90
