// What: the axes of every tensor of the scan by name, in letters, and views cut or turned by them.
// Why: files in another order, pieces of ranks and the allocation of outputs follow one table.
// Never: copies an element.
#pragma once

#include <string>
#include <string_view>

#include "talea/mamba3.hpp"

namespace talea::cli::scan {

// b batch, s tokens, r rank, g groups, n columns of q, h heads, p columns of v, a pairs,
// i sequences, e entries of cu_seqlens. `axes` is the count that the tensor at hand has: some have
// a rank axis or not. Gradients go by the name of their tensor without "d_".
std::string axes_of(std::string_view name, int axes);

// The file's order of a tensor's axes under --layout bsrgn, bsgrn or sbrgn.
std::string file_axes(std::string_view name, int axes, std::string_view layout);

// The view of `t`, whose axes stand in the order `from`, in the order `to`.
Tensor in_order(const Tensor& t, std::string_view from, std::string_view to);

// Elements [begin, end) of the axis `letter`; unchanged where the tensor has none.
Tensor cut(const Tensor& t, std::string_view axes, char letter, int64_t begin, int64_t end);

}  // namespace talea::cli::scan
