// What: the product of two whole matrices of any stride and floating dtype, summed in fp32.
// Why: lanes that do materialise their operands share the tile kernel and its fixed order.
// Never: allocates; packing takes place in the caller's scratch.
#pragma once

#include <cstdint>

#include "talea/tensor.hpp"

namespace talea::cpu {

// Element (i, j) at data[i * row_stride + j * col_stride].
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t row_stride = 0, col_stride = 1;

  MatrixView transposed() const { return {data, dtype, col_stride, row_stride}; }
};

// C [m, n] (+)= A [m, k] B [k, n]. Bitwise the same for any number of threads.
struct MatrixProduct {
  MatrixView a, b;
  float* c = nullptr;
  int64_t c_stride = 0;
  int64_t m = 0, n = 0, k = 0;
  bool accumulate = false;
  int threads = 1;
  float* scratch = nullptr;  // threads * matrix_product_scratch floats, 64-byte aligned
};
inline constexpr int64_t matrix_product_scratch = 256 * 256 + 256 * 192 + 256;
void matrix_product(const MatrixProduct& p);

}  // namespace talea::cpu
