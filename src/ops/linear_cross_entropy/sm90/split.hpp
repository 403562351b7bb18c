// What: a sum of dW as two numbers: 16 bits in the returned gradient, and what those need beside
// them.
// Why: dW over chunks needs 8 or 4 bits an element of its own, or an exponent for 64, not 32 bits.
// Never: returns codes: dW is the sum, rounded to bf16, once its last chunk or its factor has come.
#pragma once
#include <cuda_runtime.h>

#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {

// The rest lies in pieces of 16 rows x 64 columns, in the order of a product's accumulators; of
// exponents, a byte a row.
struct Rest {
  static constexpr int64_t kRows = 16, kColumns = 64;
  static constexpr int kExponents = 1;  // dW holds codes of a BlockFloat
  void* data = nullptr;
  int bits = 0;         // 8, 4, kExponents, or 0: none is kept, each chunk rounds to bf16
  int64_t columns = 0;  // of the matrix

  bool is_coded() const { return bits == kExponents; }

  __host__ __device__ static int64_t pieces(int64_t hidden) {
    return (hidden + kColumns - 1) / kColumns;
  }
  __host__ __device__ static constexpr int64_t piece_bytes(int bits) {
    return bits == kExponents ? kRows : kRows * kColumns * bits / 8;
  }
  // A tail tells 8 bits from 4, and exponents from both: their pieces are multiples of 16 bytes.
  static constexpr int64_t tail(int bits) { return bits == 8 ? 16 : bits == kExponents ? 4 : 0; }
  static int64_t bytes(int64_t vocab, int64_t hidden, int bits) {
    const int64_t blocks = vocab > 0 ? (vocab + kRows - 1) / kRows : 1;
    return blocks * pieces(hidden) * piece_bytes(bits) + tail(bits);
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
