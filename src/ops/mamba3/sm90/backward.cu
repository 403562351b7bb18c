// What: the gradients of a segment, of heads that are units.
// Why: their kernels know that no head is cut.
// Never: forms what it leaves to units.hpp.
#include "ops/mamba3/sm90/backward_kernel.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90 {

void launch_back(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                 cudaStream_t stream) {
  if (!cut.whole) return units::launch_back(args, cut, wave, b, stream);
  backward::launch_back(args, wave, b, stream);
}

}  // namespace talea::mamba3::sm90
