// What: the lanes of a GPU where the build has no CUDA.
// Why: "not built" is a reason like any other, and device tensors get an answer.
// Never: runs; a build with CUDA leaves this file out.
#include "ops/mamba3/lane.hpp"

namespace talea::mamba3 {

Lane sm90_lane() { return absent_lane<Operator>("sm90", DeviceKind::cuda); }
Lane cuda_lane() { return absent_lane<Operator>("cuda", DeviceKind::cuda); }

}  // namespace talea::mamba3
