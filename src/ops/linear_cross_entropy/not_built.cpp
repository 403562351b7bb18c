// What: the table entries of the CUDA lanes in a build without CUDA.
// Why: "not built" is a reason like any other.
// Never: runs.
#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce {
namespace {

Lane absent(const char* name) {
  return {name,
          "not built",
          [](const Problem&, const DeviceFacts&) -> std::optional<std::string> {
            return "not built: this library was built without CUDA";
          },
          nullptr,
          nullptr,
          nullptr};
}

}  // namespace

Lane cuda_lane() { return absent("cuda"); }
Lane sm90_lane() { return absent("sm90"); }

}  // namespace talea::lce
