// What: the gradients of a segment, of heads that are cut into units.
// Why: a file of its own compiles beside that of the others.
// Never: anything that backward_kernel.cuh does not say.
#include "ops/mamba3/sm90/backward_kernel.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90::units {

void launch_back(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                 cudaStream_t stream) {
  backward::launch_back(args, wave, b, stream, cut);
}

}  // namespace talea::mamba3::sm90::units
