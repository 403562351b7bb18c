// What: reads and writes NumPy .npy files (format versions 1 to 3).
// Why: the plainest way to hand a tensor to the tool.
// Never: evaluates a header as code, unpickles, or trusts a length.
#pragma once

#include <string>

#include "io/host_tensor.hpp"
#include "io/source.hpp"

namespace talea::io {

// <f4, <f8, <f2, <i4, <i8; other dtypes and big-endian files are refused by name. A Fortran-order
// file gives a view with column-major strides, without a copy. Error(invalid_data) names file and
// field.
HostTensor read_npy(const Source& source);
HostTensor read_npy(const std::string& path);

// Row-major, version 1.0, atomic. bf16 has no .npy dtype and is refused.
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace talea::io
