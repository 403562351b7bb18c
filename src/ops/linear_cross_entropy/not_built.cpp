// What: the table entries of the CUDA lanes in a build without CUDA.
// Why: "not built" is a reason like any other.
// Never: runs.
#include "core/fail.hpp"
#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/late.hpp"

namespace talea::lce {

Fault* known_fault() { return nullptr; }
void late_on_device(const LinearCrossEntropyLate&, Stream) {
  fail(ErrorKind::unavailable, "factor: on a device; this library was built without CUDA");
}

Lane cuda_lane() { return absent_lane<Operator>("cuda", DeviceKind::cuda); }
Lane sm90_lane() { return absent_lane<Operator>("sm90", DeviceKind::cuda); }

}  // namespace talea::lce
