// What: what a rest of dW says of itself by its bytes.
// Why: a late factor needs nothing of the call that formed it.
// Never: reads the rest.
#include <algorithm>

#include "core/fail.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/late.hpp"
#include "ops/linear_cross_entropy/sm90/split.hpp"

namespace talea::lce {

// A rest by its bytes, and the rows that it covers: padding rows have none.
struct RestRows {
  Rest rest;
  int64_t rows = 0;
};

static RestRows rest_of(void* data, int64_t bytes, int64_t hidden) {
  const int bits = bytes % 16 == 4 ? Rest::kExponents : bytes % 32 == 16 ? 8 : 4;
  const int64_t group = Rest::group_bytes(hidden, bits), body = bytes - Rest::tail(bits);
  require(body > 0 && group > 0 && body % group == 0, ErrorKind::invalid_data,
          "dw_rest: {} bytes belong to no dw with {} columns", bytes, hidden);
  return {{data, bits, hidden}, body / group * Rest::group_rows(bits)};
}

void multiply_with_rests(const LinearCrossEntropyLate& l, Stream on) {
  const cudaStream_t stream = device::cuda_stream(on);
  if (l.dx_rest)
    multiply_split_rows({View(l.factor), static_cast<uint16_t*>(l.dx.data),
                         static_cast<const uint8_t*>(l.dx_rest.data), l.dx.shape[0], l.dx.shape[1],
                         l.dx.stride[0], l.dx_rest.stride[0]},
                        stream);
  if (!l.dw_rest) return;
  LateWeightParams p;
  p.factor = View(l.factor);
  p.dw = static_cast<uint16_t*>(l.dw.data);
  p.hidden = l.dw.shape[1], p.dw_stride = l.dw.stride[0];
  const RestRows kept = rest_of(l.dw_rest.data, l.dw_rest.elements() * 4, p.hidden);
  p.rest = kept.rest, p.vocab = std::min(l.dw.shape[0], kept.rows);
  multiply_split(p, stream);
}

}  // namespace talea::lce
