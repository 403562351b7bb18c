// What: the gradients of a slice, of heads of two slabs, of eight rows a token.
// Why: a file of its own compiles beside those of the other ranks.
// Never: anything that gradients_kernel.cuh does not say.
#include "ops/mamba3/sm90/gradients_kernel.cuh"

namespace talea::mamba3::sm90::gradients {

void launch_slabs_eight_rows(const Args& args, const Wave& wave, const UnitBuffers& b,
                             cudaStream_t stream) {
  launch_rank<8, 2>(args, wave, b, stream);
}

}  // namespace talea::mamba3::sm90::gradients
