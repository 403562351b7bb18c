// What: a strided host array of any dtype inside a guarded block of bytes.
// Why: tests need odd offsets, gaps and expanded views, and must see any byte that was touched.
// Never: shares code with src/; its own 16-bit conversions are checked against the library's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "talea/tensor.hpp"

namespace talea::testing {

// How a matrix or vector lies in its block.
enum class View { contiguous, padded_rows, transposed, expanded, reversed, strided_columns };
inline constexpr int view_count = 6;
const char* name_of(View view);

double decode(DType dtype, const void* data, int64_t index);
void encode(DType dtype, void* data, int64_t index, long double value);
// The value after one rounding to dtype (nearest, ties to even).
long double rounded(DType dtype, long double value);

class Array {
 public:
  static constexpr int64_t guard_bytes = 64;

  Array() = default;  // absent
  // skew: elements by which the data is shifted off the 256-byte grid.
  Array(DType dtype, std::vector<int64_t> shape, View view = View::contiguous, int64_t skew = 0);

  bool present() const { return present_; }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t elements() const;
  long double get(int64_t i = 0, int64_t j = 0) const;
  int64_t integer(int64_t i = 0, int64_t j = 0) const;
  void set(int64_t i, int64_t j, long double value);
  void set_integer(int64_t i, int64_t j, int64_t value);

  // The view in a copy of block() that starts at base.
  Tensor at(void* base, DeviceKind device, int device_index = 0) const;
  std::vector<std::byte>& block() { return block_; }
  const std::vector<std::byte>& block() const { return block_; }
  // Bytes that belong to no element: guards and gaps.
  std::vector<bool> outside() const;
  // Stride in elements; tests of refusals bend it.
  std::vector<int64_t>& stride() { return stride_; }

 private:
  int64_t position(int64_t i, int64_t j) const;

  bool present_ = false;
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_, stride_;
  int64_t first_ = 0;  // index of element (0, 0), in elements from the block's start
  std::vector<std::byte> block_;
};

}  // namespace talea::testing
