// What: the table entry of lane sm90.
// Why: a lane that is not there stays in the table, and says so.
// Never: runs.
#include "ops/sparse_attention/lane.hpp"

namespace talea::sparse_attention {

Lane sm90_lane() {
  Lane lane = absent_lane<Operator>("sm90", DeviceKind::cuda);
  lane.decline = [](const Problem&, const DeviceFacts&) -> std::optional<std::string> {
    return "not built: this version has no such lane of sparse attention";
  };
  return lane;
}

}  // namespace talea::sparse_attention
