// What: the table entries of the device lanes.
// Why: "not built" is a reason like any other.
// Never: runs.
#include "ops/sparse_attention/lane.hpp"

namespace talea::sparse_attention {
namespace {

Lane absent(const char* name) {
  return {name,
          "not built",
          [](const Problem&, const DeviceFacts&) -> std::optional<std::string> {
            return "not built: this version has no such lane of sparse attention";
          },
          nullptr,
          nullptr,
          nullptr};
}

}  // namespace

Lane sm90_lane() { return absent("sm90"); }

}  // namespace talea::sparse_attention
