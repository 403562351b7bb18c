// What: fits a caller's tensor to the extents it must have; B and G may be missing.
// Why: one place says which shapes a tensor may come in, and its message shows the full one.
// Never: dereferences a tensor.
#pragma once

#include <string>
#include <vector>

#include "core/fail.hpp"
#include "core/views.hpp"
#include "ops/sparse_attention/args.hpp"

namespace talea::sparse_attention {

// An extent of a tensor. optional: the tensor may come without it where it is 1.
struct Dim {
  const char* name;
  int64_t extent;
  bool optional = false;
};

// The view with strides in the order of dims (at most four), missing ones 0. Earlier optional
// extents are missing first. Throws Error(invalid_data) where no reading fits.
View fit(const char* name, const Tensor& t, const std::vector<Dim>& dims);

// As fit(), for what is one number for all rows (rank 0), or has fewer extents behind the first.
View fit_any(const char* name, const Tensor& t, const std::vector<std::vector<Dim>>& readings);

// The last stride must be 1: rows are read as they lie.
void check_rows(const char* name, const Tensor& t);
Strides strides_of(const View& v);

}  // namespace talea::sparse_attention
