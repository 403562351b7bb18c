// What: lane cuda where the build has no CUDA.
// Why: "not built" is a reason like any other, and device tensors get an answer.
// Never: runs; a build with CUDA leaves this file out.
#include "ops/mamba3/lane.hpp"

namespace talea::mamba3 {

Lane cuda_lane() { return absent_lane<Operator>("cuda", DeviceKind::cuda); }

}  // namespace talea::mamba3
