// What: a tensor in host memory that owns its bytes.
// Why: readers hand out one value whose view goes straight into the operator.
// Never: converts a dtype.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "talea/tensor.hpp"

namespace talea::io {

struct HostTensor {
  std::shared_ptr<void> buffer;  // 64-byte aligned; copies share it
  Tensor view;

  // Element count times element size: what the view's elements occupy.
  int64_t bytes() const { return view.elements() * size_of(view.dtype); }
};

// Row-major and zeroed. Error(invalid_data) for a rank above max_rank, a negative extent or a size
// beyond int64; Error(runtime) naming the bytes when memory is short.
HostTensor allocate_tensor(DType dtype, std::span<const int64_t> shape);
HostTensor allocate_tensor(DType dtype, std::initializer_list<int64_t> shape);

// Bytes of `shape`; -1 when a negative extent or an overflow makes it meaningless. Extents of 0 do
// not hide an overflow of the others.
int64_t checked_bytes(DType dtype, std::span<const int64_t> shape);

std::string shape_text(std::span<const int64_t> shape);
std::string shape_text(const Tensor& tensor);

// SHA-256, in hex, of the elements in row-major little-endian order: what
// hashlib.sha256(array.tobytes()) gives. Any strides.
std::string tensor_sha256(const Tensor& tensor);

// Calls sink(bytes, count) over the elements in row-major order, in pieces of bounded size.
void for_each_row_major(const Tensor& tensor,
                        const std::function<void(const void*, int64_t)>& sink);

}  // namespace talea::io
