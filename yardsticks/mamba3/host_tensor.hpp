// What: a host tensor of any dtype, rank and memory order inside a guarded block of bytes.
// Why: oracle, yardstick and lanes start from the same bytes, and any byte touched beside is seen.
// Never: shares code with src/; its own conversions are checked against the library's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "talea/tensor.hpp"

namespace talea::yardsticks::mamba3 {

// How the elements lie: axes from the slowest to the fastest (empty: as written), elements left
// free behind each row of the fastest axis, elements off the grid, and an axis read by stride 0.
struct Layout {
  std::vector<int> order{};
  int64_t gap = 0, skew = 0;
  int expanded = -1;
};

class HostTensor {
 public:
  static constexpr int64_t guard_bytes = 64;

  HostTensor() = default;  // absent
  HostTensor(DType dtype, std::vector<int64_t> shape, const Layout& layout = {});

  bool present() const { return present_; }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t elements() const;
  // By the number of the element in row-major order of the shape.
  double get(int64_t flat) const;
  void set(int64_t flat, double value);
  template <typename... Index>
  int64_t flat(Index... index) const {
    int64_t at = 0, axis = 0;
    ((at = at * shape_[static_cast<size_t>(axis++)] + index), ...);
    return at;
  }
  std::vector<double> values() const;

  Tensor view() const;  // absent where this is
  // Every byte that belongs to no element still as it was made.
  bool guards_intact() const;
  std::vector<std::byte>& bytes() { return block_; }
  const std::vector<std::byte>& bytes() const { return block_; }

 private:
  int64_t position(int64_t flat) const;

  bool present_ = false;
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_, stride_;
  int64_t first_ = 0;
  std::vector<std::byte> block_;
};

// The value after one rounding to dtype (nearest, ties to even).
double rounded(DType dtype, double value);

}  // namespace talea::yardsticks::mamba3
