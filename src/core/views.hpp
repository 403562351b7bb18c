// What: the checks of the caller's memory, for any operator: extents, strides, alignment, devices,
// overlap.
// Why: a view that cannot be right is an error before any work, whichever lane would run.
// Never: dereferences a tensor, or knows which tensors an operator has.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/fields.hpp"
#include "talea/call.hpp"

namespace talea {

// Absent tensors pass every check. All throw Error, which names the tensor.

// Each view by itself: rank, extents and strides that 64 bits hold, an address that its dtype may
// have. The others take this as given.
void check_views(std::span<const NamedTensor> tensors);

// All on the device of `first`.
void check_devices(const NamedTensor& first, std::span<const NamedTensor> tensors);

// No output shares memory with an input, another output or itself.
void check_overlap(std::span<const NamedTensor> inputs, std::span<const NamedTensor> outputs);

// At least `needed` bytes, in which no tensor lies; `lane` is for the text.
void check_workspace(const char* lane, const Workspace& given, int64_t needed,
                     std::span<const NamedTensor> tensors);

// Exactly this shape, and an address where there are elements.
void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> want);

// One of these dtypes.
void check_dtype(const char* name, const Tensor& t, std::initializer_list<DType> allowed);

// A shape as text, written where an error's text is: a check that holds writes nothing.
struct ShapeText {
  const Tensor& tensor;
  std::string_view lead;  // in front of a tensor that is there; of one that is not: no text at all
};
std::string text_of(const ShapeText& shape);

// "[2, 3]".
inline ShapeText shape_of(const Tensor& t) { return {t, {}}; }
// ", not [2, 3]", or nothing where there is no tensor.
inline ShapeText but_given(const Tensor& t) { return {t, ", not "}; }

}  // namespace talea

template <>
struct fmt::formatter<talea::ShapeText> : fmt::formatter<std::string_view> {
  auto format(const talea::ShapeText& shape, fmt::format_context& to) const {
    return fmt::formatter<std::string_view>::format(talea::text_of(shape), to);
  }
};
