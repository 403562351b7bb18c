// What: a host tensor of up to four extents with any strides, and its numbers as doubles.
// Why: oracle and eager yardstick read inputs through code that the library does not use.
// Never: fast, and never shares code with src.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "talea/tensor.hpp"

namespace talea::yardsticks::sparse_attention {

// By the definition of each format: sign, exponent field, mantissa field.
double decode(DType dtype, const std::byte* at);
void encode(DType dtype, std::byte* at, double value);
double rounded(DType dtype, double value);

// How the extents lie in memory.
enum class Lay {
  dense,
  padded,
  swapped,
  expanded
};  // swapped: the first two extents change places

class Grid {
 public:
  static constexpr int64_t guard = 64;  // bytes on both sides

  Grid() = default;  // absent
  Grid(DType dtype, std::vector<int64_t> shape, Lay lay = Lay::dense);

  explicit operator bool() const { return present_; }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t elements() const;
  double get(int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0) const;
  int64_t integer(int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0) const;
  void put(double v, int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0);
  void put_integer(int64_t v, int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0);
  std::byte* bytes(int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0);
  const std::byte* bytes(int64_t i = 0, int64_t j = 0, int64_t k = 0, int64_t l = 0) const;

  // Without the extents in `without`, which must be 1. data: null for this grid's own memory.
  Tensor tensor(std::vector<int> without = {}, void* data = nullptr) const;
  void fill_bytes(unsigned char value);
  // The bytes of no element: guards, padding. Compared before and after a call.
  std::vector<std::byte> outside() const;
  const std::vector<std::byte>& memory() const { return memory_; }
  std::vector<double> numbers() const;  // in order of the extents

 private:
  int64_t position(int64_t i, int64_t j, int64_t k, int64_t l) const;

  bool present_ = false;
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_;
  std::array<int64_t, 4> stride_{};
  std::vector<std::byte> memory_;
};

}  // namespace talea::yardsticks::sparse_attention
