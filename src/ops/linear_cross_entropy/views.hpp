// What: the checks of the caller's memory: extents, strides, alignment, devices, overlap.
// Why: a view that cannot be right is an error before any work, whichever lane would run.
// Never: dereferences a tensor.
#pragma once

#include <vector>

#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce {

struct NamedTensor {
  const char* name;
  const Tensor* tensor;
};

// Each view by itself: rank, extents and strides that 64 bits hold, an address that its dtype may
// have. The others take this as given. All throw Error.
void check_views(const Inputs& in, const Outputs& out);

// All on the device of hidden.
void check_devices(const Inputs& in, const Outputs& out);

// No output shares memory with an input, another output or itself.
void check_overlap(const Inputs& in, const Outputs& out);

// No input or output lies in the workspace.
void check_workspace(const Inputs& in, const Outputs& out, const Workspace& workspace);

}  // namespace talea::lce
