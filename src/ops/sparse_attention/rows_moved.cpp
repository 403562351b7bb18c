// What: rows on their way between tensors and what ranks exchange, in host memory.
// Why: device tensors take the same steps by kernels: rows_moved.cu.
// Never: exchanges.
#include "ops/sparse_attention/rows_moved.hpp"

#include <cstring>

namespace talea::sparse_attention {

void RowsMoved::copy(const RowBlock& b) const {
  if (device != DeviceKind::cpu) return copy_on_device(*this, b);
  for (int64_t i = 0; i < b.rows; ++i)
    for (int64_t g = 0; g < b.groups; ++g)
      std::memcpy(b.to + i * b.to_row + g * b.bytes, b.from + i * b.from_row + g * b.from_group,
                  static_cast<size_t>(b.bytes));
}

void RowsMoved::clear(char* to, int64_t bytes) const {
  if (device != DeviceKind::cpu) return clear_on_device(*this, to, bytes);
  std::memset(to, 0, static_cast<size_t>(bytes));
}

void RowsMoved::put(const View& from, const View& to, const std::array<int64_t, 4>& extent,
                    bool adds) const {
  if (device != DeviceKind::cpu) return put_on_device(*this, from, to, extent, adds);
  const auto [outer, inner, groups, columns] = extent;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i)
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t c = 0; c < columns; ++c) {
          const double x = from.get(o, i, g, c);
          to.put(adds ? to.get(o, i, g, c) + x : x, o, i, g, c);
        }
}

}  // namespace talea::sparse_attention
