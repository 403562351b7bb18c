// What: the table entry of lane cuda while it is not part of the build.
// Why: "not built" is a reason like any other.
// Never: runs.
#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce {

Lane cuda_lane() {
  return {
      "cuda",
      "not built",
      [](const Problem&, const DeviceFacts&) -> std::optional<std::string> { return "not built"; },
      nullptr,
      nullptr,
      nullptr};
}

}  // namespace talea::lce
