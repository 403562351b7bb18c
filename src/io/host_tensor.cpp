// What: allocation, sizes and row-major traversal of host tensors.
// Why: readers, writers and hashes share one overflow check and one order of elements.
// Never: trusts a product of extents.
#include "io/host_tensor.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/fail.hpp"
#include "io/sha256.hpp"

namespace talea::io {

int64_t checked_bytes(DType dtype, std::span<const int64_t> shape) {
  int64_t product = size_of(dtype);
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return -1;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, extent, &product)) {
      return -1;
    }
  }
  return empty ? 0 : product;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += fmt::format("{}{}", i ? ", " : "", shape[i]);
  return text + "]";
}

std::string shape_text(const Tensor& tensor) {
  return shape_text(std::span(tensor.shape.data(), static_cast<size_t>(tensor.rank)));
}

HostTensor allocate_tensor(DType dtype, std::span<const int64_t> shape) {
  require(shape.size() <= max_rank, ErrorKind::invalid_data,
          "shape {}: more than {} dimensions are not supported", shape_text(shape), max_rank);
  const int64_t bytes = checked_bytes(dtype, shape);
  require(bytes >= 0, ErrorKind::invalid_data,
          "shape {}: negative, or more bytes than 64 bits can count", shape_text(shape));
  HostTensor tensor;
  constexpr int64_t alignment = 64;
  require(bytes <= INT64_MAX - alignment, ErrorKind::invalid_data, "shape {}: too large",
          shape_text(shape));
  const int64_t rounded = std::max(alignment, (bytes + alignment - 1) / alignment * alignment);
  void* data = std::aligned_alloc(alignment, static_cast<size_t>(rounded));
  require(data != nullptr, ErrorKind::runtime, "shape {}: cannot allocate {} bytes",
          shape_text(shape), bytes);
  tensor.buffer = std::shared_ptr<void>(data, std::free);
  std::memset(data, 0, static_cast<size_t>(rounded));
  Tensor& view = tensor.view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  view.present = true;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);  // cannot overflow: checked_bytes skipped zeros too
  }
  return tensor;
}

HostTensor allocate_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  return allocate_tensor(dtype, std::span(shape.begin(), shape.size()));
}

void for_each_row_major(const Tensor& tensor,
                        const std::function<void(const void*, int64_t)>& sink) {
  require(tensor.device == DeviceKind::cpu, ErrorKind::usage,
          "device tensors must be copied to the host before they are written or hashed");
  const int64_t element = size_of(tensor.dtype), total = tensor.elements();
  const char* base = static_cast<const char*>(tensor.data);
  if (total == 0) return;
  if (tensor.contiguous()) {
    sink(base, total * element);
    return;
  }
  constexpr int64_t piece_bytes = int64_t{1} << 20;
  std::vector<char> piece(static_cast<size_t>(std::min(piece_bytes, total * element)));
  std::array<int64_t, max_rank> index{};
  int64_t filled = 0, offset = 0;
  for (int64_t n = 0; n < total; ++n) {
    std::memcpy(piece.data() + filled, base + offset * element, static_cast<size_t>(element));
    filled += element;
    if (filled + element > static_cast<int64_t>(piece.size()) || n + 1 == total) {
      sink(piece.data(), filled);
      filled = 0;
    }
    for (int i = tensor.rank - 1; i >= 0; --i) {
      offset += tensor.stride[i];
      if (++index[i] < tensor.shape[i]) break;
      offset -= tensor.stride[i] * tensor.shape[i];
      index[i] = 0;
    }
  }
}

std::string tensor_sha256(const Tensor& tensor) {
  Sha256 hash;
  for_each_row_major(tensor, [&](const void* data, int64_t bytes) { hash.add(data, bytes); });
  return hash.hex();
}

}  // namespace talea::io
