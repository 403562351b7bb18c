// What: fits a caller's tensor to the extents it must have; B and G may be missing.
// Why: one place says which shapes a tensor may come in, and its message shows the full one.
// Never: dereferences a tensor.
#include "ops/sparse_attention/shapes.hpp"

namespace talea::sparse_attention {
namespace {

constexpr auto data_error = ErrorKind::invalid_data;

std::string full_shape(const std::vector<Dim>& dims) {
  std::string s = "[";
  for (size_t i = 0; i < dims.size(); ++i)
    s += fmt::format("{}{}{} = {}", i ? ", " : "",
                     dims[i].optional && dims[i].extent == 1 ? "?" : "", dims[i].name,
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

}  // namespace

View fit(const char* name, const Tensor& t, const std::vector<Dim>& dims) {
  return fit_any(name, t, {dims});
}

View fit_any(const char* name, const Tensor& t, const std::vector<std::vector<Dim>>& readings) {
  View v;
  if (!t) return v;
  require(t.data || t.elements() == 0, data_error,
          "{}: null pointer with shape {}: no storage is reachable", name, shape_of(t));
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

void check_rows(const char* name, const Tensor& t) {
  if (!t || t.rank == 0 || t.shape[t.rank - 1] <= 1 || t.elements() == 0) return;
  require(t.stride[t.rank - 1] == 1, data_error, "{}: last stride = {}: must be 1", name,
          t.stride[t.rank - 1]);
}

Strides strides_of(const View& v) { return {v.stride[0], v.stride[1], v.stride[2]}; }

}  // namespace talea::sparse_attention
