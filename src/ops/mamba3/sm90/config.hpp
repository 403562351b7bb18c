// What: what lane sm90 takes, and how it cuts it: chunk, segments, slices, sequences side by side.
// Why: a pure function of problem and device, tested without a GPU.
// Never: reads a tensor, or lets a limit change a bit of a result.
#pragma once

#include <optional>
#include <string>

#include "ops/mamba3/rows/plan.hpp"

namespace talea::mamba3::sm90 {

inline constexpr int64_t processors = 132;  // of the chips that the lane is for

// Nothing: the kernels take it. Otherwise what of the problem they do not.
std::optional<std::string> declined(const Problem& p, const DeviceFacts& device);

cuda::Plan make_plan(const Problem& p, const DeviceFacts& device);

}  // namespace talea::mamba3::sm90
