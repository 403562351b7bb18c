// What: which shapes, dtypes and combinations of tensors the scan takes.
// Why: section 1.1 of the definition, one line a tensor, apart from how the problem is derived.
// Never: dereferences a tensor.
#pragma once

#include "ops/mamba3/contract.hpp"

namespace talea::mamba3 {

// Present tensors only; errors name the tensor, what it is and what it would have to be.
void check_presence(const Problem& p, const Inputs& in, const Outputs& out);
void check_dtypes(const Problem& p, const Inputs& in, const Outputs& out);
void check_shapes(const Problem& p, const Inputs& in, const Outputs& out);

}  // namespace talea::mamba3
