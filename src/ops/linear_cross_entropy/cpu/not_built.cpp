// What: the table entry of lane cpu while it is not part of the build.
// Why: "not built" is a reason like any other.
// Never: runs.
#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce {

Lane cpu_lane() {
  return {
      "cpu",
      "not built",
      [](const Problem&, const DeviceFacts&) -> std::optional<std::string> { return "not built"; },
      nullptr,
      nullptr,
      nullptr};
}

}  // namespace talea::lce
