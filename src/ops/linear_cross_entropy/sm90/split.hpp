// What: a sum of dW as two numbers: 16 bits in the returned gradient, and what those need beside
// them.
// Why: dW over chunks needs 8 or 4 bits an element of its own, or an exponent for 128, not 32 bits.
// Never: returns codes: dW is the sum, rounded to bf16, once its last chunk or its factor has come.
#pragma once
#include <cuda_runtime.h>

#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {

// The rest lies in pieces of 16 rows x 64 columns, in the order of a product's accumulators.
// An exponent is that of 128 columns. They lie by tiles of 192 x 128: in a tile by warps, of a warp
// by pieces, in a piece by rows.
struct Rest {
  static constexpr int64_t kRows = 16, kColumns = 64;
  static constexpr int64_t kTileRows = 192, kTileColumns = 128;
  static constexpr int64_t kWarpBytes = 3 * kRows, kTileBytes = 4 * kWarpBytes;
  static constexpr int kExponents = 1;  // dW holds codes of a BlockFloat
  void* data = nullptr;
  int bits = 0;         // 8, 4, kExponents, or 0: none is kept, each chunk rounds to bf16
  int64_t columns = 0;  // of the matrix

  bool is_coded() const { return bits == kExponents; }

  __host__ __device__ static int64_t pieces(int64_t hidden) {
    return (hidden + kColumns - 1) / kColumns;
  }
  static constexpr int64_t tiles(int64_t columns) {
    return (columns + kTileColumns - 1) / kTileColumns;
  }
  // The byte of the exponent of (row, column)'s block.
  __host__ __device__ static constexpr int64_t exponent_at(int64_t row, int64_t column,
                                                           int64_t columns) {
    const int64_t tile = row / kTileRows * tiles(columns) + column / kTileColumns;
    const int64_t in = row % kTileRows, warp = in % 64 / kRows;
    return tile * kTileBytes + warp * kWarpBytes + in / 64 * kRows + in % kRows;
  }

  static constexpr int64_t piece_bytes(int bits) {
    return bits == kExponents ? kRows / 2 : kRows * kColumns * bits / 8;
  }
  // So many rows of the matrix, and of its rest so many bytes, go together.
  static constexpr int64_t group_rows(int bits) { return bits == kExponents ? kTileRows : kRows; }
  static int64_t group_bytes(int64_t hidden, int bits) {
    return bits == kExponents ? tiles(hidden) * kTileBytes : pieces(hidden) * piece_bytes(bits);
  }
  // A tail tells 8 bits from 4, and exponents from both: the rest are multiples of 32 bytes.
  static constexpr int64_t tail(int bits) { return bits == 8 ? 16 : bits == kExponents ? 4 : 0; }
  static int64_t bytes(int64_t vocab, int64_t hidden, int bits) {
    const int64_t rows = group_rows(bits), groups = vocab > 0 ? (vocab + rows - 1) / rows : 1;
    return groups * group_bytes(hidden, bits) + tail(bits);
  }
};

// As scatter_targets, into a dW of two numbers.
struct SplitScatterParams {
  ScatterParams rows;  // without dw
  uint16_t* dw = nullptr;
  int64_t dw_stride = 0;
  Rest rest;
};
void scatter_targets(const SplitScatterParams& p, cudaStream_t stream);

// dW *= factor, every digit kept, rounded once.
struct LateWeightParams {
  View factor;  // a scalar
  uint16_t* dw = nullptr;
  int64_t vocab = 0, hidden = 0, dw_stride = 0;
  Rest rest;
};
void multiply_split(const LateWeightParams& p, cudaStream_t stream);

// dX = its codes * factor, of the row or of all, rounded once.
struct LateRowsParams {
  View factor;
  uint16_t* dx = nullptr;
  const uint8_t* exponents = nullptr;
  int64_t rows = 0, hidden = 0, dx_stride = 0, exponents_stride = 0;
};
void multiply_split_rows(const LateRowsParams& p, cudaStream_t stream);

}  // namespace talea::lce
