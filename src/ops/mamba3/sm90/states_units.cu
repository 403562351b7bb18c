// What: the states of backward of heads that are cut into units.
// Why: a file of its own compiles beside that of the others.
// Never: anything that states_kernel.cuh does not say.
#include "ops/mamba3/sm90/states_kernel.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90::units {

void launch_chains(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   int64_t states, int64_t upstream, bool ahead, cudaStream_t stream) {
  states::launch_chains(args, wave, b, states, upstream, ahead, stream, cut);
}

}  // namespace talea::mamba3::sm90::units
