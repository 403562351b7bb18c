// What: rows of tokens on their way between tensors and what ranks sum, in host memory.
// Why: device tensors take the same steps by kernels: rows_moved.cu.
// Never: sums.
#include "ops/mamba3/rows_moved.hpp"

#include <cstring>

#include "core/half.hpp"

namespace talea::mamba3 {
namespace {

int64_t place_of(const RowsOfTokens& rows, int64_t token) {
  const int64_t at = token - rows.first;
  return at / rows.tokens * rows.stride[0] + at % rows.tokens * rows.stride[1];
}

}  // namespace

void RowsMoved::clear(char* to, int64_t bytes) const {
  if (device != DeviceKind::cpu) return clear_on_device(*this, to, bytes);
  std::memset(to, 0, static_cast<size_t>(bytes));
}

void RowsMoved::put(const RowsOfTokens& from, const RowsOfTokens& to, const RowShape& shape,
                    int64_t first, int64_t count) const {
  if (device != DeviceKind::cpu) return put_on_device(*this, from, to, shape, first, count);
  const auto row_of = [](const RowsOfTokens& rows, int64_t home, int64_t r, int64_t g) {
    return home + r * rows.stride[2] + g * rows.stride[3];
  };
  for (int64_t token = first; token < first + count; ++token) {
    const int64_t source = place_of(from, token), target = place_of(to, token);
    for (int64_t r = 0; r < shape.r; ++r)
      for (int64_t g = 0; g < shape.g; ++g)
        for (int64_t n = 0; n < shape.n; ++n)
          store_element(
              to.data, to.dtype, row_of(to, target, r, g) + n * to.stride[4],
              load_element(from.data, from.dtype, row_of(from, source, r, g) + n * from.stride[4]));
  }
}

}  // namespace talea::mamba3
