// What: forward of heads that are cut into units.
// Why: a file of its own compiles beside that of the others.
// Never: anything that forward_kernel.cuh does not say.
#include "ops/mamba3/sm90/forward_kernel.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90::units {

void launch_chunks(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   int64_t count, int64_t first, int64_t ahead, cudaStream_t stream) {
  forward::launch_chunks(args, wave, b, count, first, ahead, stream, cut);
}

}  // namespace talea::mamba3::sm90::units
