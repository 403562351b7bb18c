// What: the checks of the caller's memory: extents, strides, alignment, devices, overlap.
// Why: a wrong view makes wrong numbers in silence, or on a device an error nobody can recover
// from.
// Never: dereferences a tensor.
#include "core/views.hpp"

#include <algorithm>
#include <array>

#include "core/fail.hpp"

namespace talea {
namespace {

constexpr auto data_error = ErrorKind::invalid_data;

template <typename F>
void for_present(std::span<const NamedTensor> list, F f) {
  for (const NamedTensor& n : list)
    if (*n.tensor) f(n.name, *n.tensor);
}

// The addresses [first, last) a view can touch.
struct Extent {
  uintptr_t first;
  uintptr_t last;
  // Nothing crosses an empty one, wherever it points.
  bool crosses(const Extent& other) const {
    return std::max(first, other.first) < std::min(last, other.last);
  }
};

Extent extent_of(const Tensor& t) {
  const auto base = reinterpret_cast<uintptr_t>(t.data);
  if (t.elements() == 0 || !t.data) return {base, base};  // a null pointer: named by another check
  int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank; ++i) {
    const int64_t reach = (t.shape[i] - 1) * t.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto bytes = [&](int64_t n) { return static_cast<uintptr_t>(n * size_of(t.dtype)); };
  return {base + bytes(low), base + bytes(high + 1)};
}

// So far that the sum of five, in bytes of the widest dtype, stays within 64 bits.
constexpr int64_t most_elements = INT64_MAX / 64;

void check_view(const char* name, const Tensor& t) {
  require(t.rank >= 0 && t.rank <= max_rank, ErrorKind::usage, "{}: rank = {}: must lie in [0, {}]",
          name, t.rank, max_rank);
  require(size_of(t.dtype) > 0, ErrorKind::usage, "{}: dtype = {}: no such dtype", name,
          static_cast<int32_t>(t.dtype));
  int64_t elements = 1;
  bool empty = false;
  for (int i = 0; i < t.rank; ++i) {
    require(t.shape[i] >= 0, ErrorKind::usage, "{}: shape[{}] = {}: must be >= 0", name, i,
            t.shape[i]);
    require(!__builtin_mul_overflow(elements, std::max<int64_t>(t.shape[i], 1), &elements) &&
                elements <= most_elements,
            ErrorKind::usage, "{}: shape[{}] = {}: the elements overflow 64 bits", name, i,
            t.shape[i]);
    empty = empty || t.shape[i] == 0;
  }
  // Also where there are no elements: offsets are formed before anybody knows that none is read.
  for (int i = 0; i < t.rank; ++i) {
    int64_t reach = 0;
    require(!__builtin_mul_overflow(std::max<int64_t>(t.shape[i] - 1, 0), t.stride[i], &reach) &&
                reach <= most_elements && reach >= -most_elements,
            ErrorKind::usage, "{}: stride {} of dimension {}: the addresses overflow 64 bits", name,
            t.stride[i], i);
  }
  require(empty || reinterpret_cast<uintptr_t>(t.data) % static_cast<size_t>(size_of(t.dtype)) == 0,
          data_error, "{}: its address is no multiple of the {} bytes of {}", name,
          size_of(t.dtype), name_of(t.dtype));
}

// Strides of an output: positive, and each beyond all that the smaller ones reach. A layout that
// interleaves its rows some other way without a collision is refused as well.
void check_output_strides(const char* name, const Tensor& t) {
  if (t.elements() == 0) return;
  std::array<int, max_rank> order{};
  int used = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 1) continue;
    require(t.stride[d] > 0, data_error,
            "{}: stride {} of dimension {} in an output; it must be positive", name, t.stride[d],
            d);
    int at = used++;  // behind the smaller strides
    for (; at > 0 && t.stride[order[at - 1]] > t.stride[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t reach = 0;
  for (int i = 0; i < used; ++i) {
    const int d = order[i];
    require(t.stride[d] > reach, data_error,
            "{}: stride {} of dimension {}: elements of an output overlap each other", name,
            t.stride[d], d);
    reach += (t.shape[d] - 1) * t.stride[d];
  }
}

}  // namespace

std::string text_of(const ShapeText& shape) {
  const Tensor& t = shape.tensor;
  if (!shape.lead.empty() && !t) return {};
  std::string s = std::string(shape.lead) + "[";
  for (int i = 0; i < t.rank; ++i) s += fmt::format("{}{}", i ? ", " : "", t.shape[i]);
  return s + "]";
}

void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> want) {
  if (!t) return;
  const auto have = std::span(t.shape).first(static_cast<size_t>(t.rank));
  if (!std::ranges::equal(have, want))
    fail(data_error, "{}: shape {} where [{}] is needed", name, shape_of(t),
         fmt::join(want.begin(), want.end(), ", "));
  if (!t.data && t.elements() > 0)
    fail(data_error, "{}: null pointer with shape {}", name, shape_of(t));
}

void check_dtype(const char* name, const Tensor& t, std::initializer_list<DType> allowed) {
  if (!t || std::ranges::find(allowed, t.dtype) != allowed.end()) return;
  std::string list;
  for (const DType one : allowed) {
    const std::string text = name_of(one);
    if (list.find(text) == std::string::npos) list += (list.empty() ? "" : ", ") + text;
  }
  fail(data_error, "{}: dtype {} is not supported here; one of {}", name, name_of(t.dtype), list);
}

void check_views(std::span<const NamedTensor> tensors) { for_present(tensors, check_view); }

void check_devices(const NamedTensor& first, std::span<const NamedTensor> tensors) {
  const auto kind = [](const Tensor& t) { return t.device == DeviceKind::cpu ? "cpu" : "cuda"; };
  const Tensor& home = *first.tensor;
  for_present(tensors, [&](const char* name, const Tensor& t) {
    require(t.device == home.device && t.device_index == home.device_index, data_error,
            "{}: lies on another device than {} ({} {} against {} {})", name, first.name, kind(t),
            t.device_index, kind(home), home.device_index);
  });
}

void check_overlap(std::span<const NamedTensor> inputs, std::span<const NamedTensor> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!*outputs[i].tensor) continue;
    const char* const name = outputs[i].name;
    check_output_strides(name, *outputs[i].tensor);
    const Extent own = extent_of(*outputs[i].tensor);
    for_present(inputs, [&](const char* other, const Tensor& t) {
      require(!own.crosses(extent_of(t)), data_error, "{}: its memory overlaps the input {}", name,
              other);
    });
    for_present(outputs.subspan(i + 1), [&](const char* other, const Tensor& t) {
      require(!own.crosses(extent_of(t)), data_error, "{}: its memory overlaps the output {}", name,
              other);
    });
  }
}

void check_workspace(const char* lane, const Workspace& given, int64_t needed,
                     std::span<const NamedTensor> tensors) {
  require(given.bytes >= needed && (given.data || needed == 0), ErrorKind::usage,
          "workspace: {} bytes given, {} bytes needed by lane {}", given.data ? given.bytes : 0,
          needed, lane);
  const auto base = reinterpret_cast<uintptr_t>(given.data);
  const Extent room = {base, base + static_cast<uintptr_t>(needed)};
  for_present(tensors, [&](const char* name, const Tensor& t) {
    require(!room.crosses(extent_of(t)), data_error, "workspace: its memory overlaps {}", name);
  });
}

}  // namespace talea
