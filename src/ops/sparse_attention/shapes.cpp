// What: fits a caller's tensor to the extents it must have; checks of the caller's memory.
// Why: a view that cannot be right is an error before any work, whichever lane would run.
// Never: dereferences a tensor.
#include "ops/sparse_attention/shapes.hpp"

#include <algorithm>

namespace talea::sparse_attention {
namespace {

constexpr auto data_error = ErrorKind::invalid_data;

std::string full_shape(const std::vector<Dim>& dims) {
  std::string s = "[";
  for (size_t i = 0; i < dims.size(); ++i)
    s += fmt::format("{}{}{} = {}", i ? ", " : "", dims[i].optional ? "?" : "", dims[i].name,
                     dims[i].extent);
  return s + "]";
}

// With the dims of `mask` left out. False: does not fit.
bool fits(const Tensor& t, const std::vector<Dim>& dims, unsigned mask, View& v) {
  int i = 0;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (mask >> d & 1) {
      if (!dims[d].optional || dims[d].extent != 1) return false;
      v.stride[d] = 0;
      continue;
    }
    if (i >= t.rank || t.shape[i] != dims[d].extent) return false;
    v.stride[d] = t.shape[i] == 1 ? 0 : t.stride[i];
    ++i;
  }
  return i == t.rank;
}

bool fit_one(const Tensor& t, const std::vector<Dim>& dims, View& v) {
  for (unsigned mask = 0; mask < 1u << dims.size(); ++mask)
    if (fits(t, dims, mask, v)) return true;
  return false;
}

struct Extent {
  uintptr_t first, last;
  bool crosses(const Extent& other) const { return first < other.last && other.first < last; }
};

Extent extent_of(const Tensor& t) {
  const auto base = reinterpret_cast<uintptr_t>(t.data);
  if (t.elements() == 0) return {base, base};
  int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank; ++i) {
    const int64_t reach = (t.shape[i] - 1) * t.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto bytes = [&](int64_t n) { return static_cast<uintptr_t>(n * size_of(t.dtype)); };
  return {base + bytes(low), base + bytes(high + 1)};
}

constexpr int64_t most_elements = INT64_MAX / 64;

void check_view(const char* name, const Tensor& t) {
  require(t.rank >= 0 && t.rank <= max_rank, ErrorKind::usage, "{}: rank = {}: must lie in [0, {}]",
          name, t.rank, max_rank);
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
  for (int i = 0; i < t.rank && !empty; ++i) {
    int64_t reach = 0;
    require(!__builtin_mul_overflow(t.shape[i] - 1, t.stride[i], &reach) &&
                reach <= most_elements && reach >= -most_elements,
            ErrorKind::usage, "{}: stride {} of dimension {}: the addresses overflow 64 bits", name,
            t.stride[i], i);
  }
  require(empty || t.data, data_error, "{}: null pointer with shape {}: no storage is reachable",
          name, shape_of(t));
  require(empty || reinterpret_cast<uintptr_t>(t.data) % static_cast<size_t>(size_of(t.dtype)) == 0,
          data_error, "{}: its address is no multiple of the {} bytes of {}", name,
          size_of(t.dtype), name_of(t.dtype));
}

void check_output_strides(const char* name, const Tensor& t) {
  if (t.elements() == 0) return;
  std::vector<int> order;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] == 1) continue;
    require(t.stride[d] > 0, data_error, "{}: stride {} of dimension {}: an output needs > 0", name,
            t.stride[d], d);
    order.push_back(d);
  }
  std::sort(order.begin(), order.end(), [&](int a, int b) { return t.stride[a] < t.stride[b]; });
  int64_t reach = 1;
  for (const int d : order) {
    require(t.stride[d] >= reach, data_error,
            "{}: stride {} of dimension {}: rows of the output share memory", name, t.stride[d], d);
    reach += (t.shape[d] - 1) * t.stride[d];
  }
}

}  // namespace

std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.rank; ++i) s += fmt::format("{}{}", i ? ", " : "", t.shape[i]);
  return s + "]";
}

View fit(const char* name, const Tensor& t, const std::vector<Dim>& dims) {
  return fit_any(name, t, {dims});
}

View fit_any(const char* name, const Tensor& t, const std::vector<std::vector<Dim>>& readings) {
  View v;
  if (!t) return v;
  std::string wanted;
  for (const std::vector<Dim>& dims : readings) {
    View found;
    if (fit_one(t, dims, found)) {
      found.data = t.data;
      found.dtype = t.dtype;
      found.present = true;
      return found;
    }
    wanted += (wanted.empty() ? "" : " or ") + full_shape(dims);
  }
  fail(data_error, "{}: shape {} where {} is needed", name, shape_of(t), wanted);
}

void check_dtype(const char* name, const Tensor& t, std::initializer_list<DType> allowed) {
  if (!t) return;
  std::string list;
  for (const DType d : allowed) {
    if (t.dtype == d) return;
    const std::string word = name_of(d);
    if (list.find(word) == std::string::npos) list += (list.empty() ? "" : ", ") + word;
  }
  fail(data_error, "{}: dtype {} is not supported here; one of {}", name, name_of(t.dtype), list);
}

void check_rows(const char* name, const Tensor& t) {
  if (!t || t.rank == 0 || t.shape[t.rank - 1] <= 1) return;
  require(t.stride[t.rank - 1] == 1, data_error, "{}: last stride = {}: must be 1", name,
          t.stride[t.rank - 1]);
}

Strides strides_of(const View& v) { return {v.stride[0], v.stride[1], v.stride[2]}; }

void check_memory(const std::vector<NamedTensor>& inputs, const std::vector<NamedTensor>& outputs) {
  const NamedTensor* leader = nullptr;
  for (const auto* list : {&inputs, &outputs})
    for (const NamedTensor& n : *list) {
      if (!*n.tensor) continue;
      check_view(n.name, *n.tensor);
      if (!leader) leader = &n;
      const auto kind = [](const Tensor& t) {
        return t.device == DeviceKind::cpu ? "cpu" : "cuda";
      };
      require(n.tensor->device == leader->tensor->device &&
                  n.tensor->device_index == leader->tensor->device_index,
              data_error, "{}: lies on another device than {} ({} {} against {} {})", n.name,
              leader->name, kind(*n.tensor), n.tensor->device_index, kind(*leader->tensor),
              leader->tensor->device_index);
    }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!*outputs[i].tensor) continue;
    check_output_strides(outputs[i].name, *outputs[i].tensor);
    const Extent own = extent_of(*outputs[i].tensor);
    for (const NamedTensor& n : inputs)
      require(!*n.tensor || !own.crosses(extent_of(*n.tensor)), data_error,
              "{}: its memory overlaps the input {}", outputs[i].name, n.name);
    for (size_t j = i + 1; j < outputs.size(); ++j)
      require(!*outputs[j].tensor || !own.crosses(extent_of(*outputs[j].tensor)), data_error,
              "{}: its memory overlaps the output {}", outputs[i].name, outputs[j].name);
  }
}

void check_workspace(const std::vector<NamedTensor>& tensors, const Workspace& workspace) {
  const auto base = reinterpret_cast<uintptr_t>(workspace.data);
  const Extent room = {base, base + static_cast<uintptr_t>(workspace.bytes)};
  for (const NamedTensor& n : tensors)
    require(!*n.tensor || !room.crosses(extent_of(*n.tensor)), data_error,
            "workspace: its memory overlaps {}", n.name);
}

}  // namespace talea::sparse_attention
