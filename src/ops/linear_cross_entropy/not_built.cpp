// What: the table entries of the CUDA lanes in a build without CUDA.
// Why: "not built" is a reason like any other.
// Never: runs.
#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::lce {

Lane cuda_lane() { return absent_lane<Operator>("cuda", DeviceKind::cuda); }
Lane sm90_lane() { return absent_lane<Operator>("sm90", DeviceKind::cuda); }

}  // namespace talea::lce
