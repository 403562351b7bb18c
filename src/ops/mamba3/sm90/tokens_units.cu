// What: turns and steps of the tokens of heads that are cut into units, by part of a head.
// Why: a file of its own compiles beside that of the others.
// Never: anything that tokens_launch.cuh does not say.
#include "ops/mamba3/sm90/tokens_launch.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90::units {

void launch_turns(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  int64_t most, cudaStream_t stream) {
  tokens::launch_turns(args, wave, b, most, stream, cut);
}
void launch_parameters(const Args& args, const Cut& cut, const UnitBuffers& b,
                       cudaStream_t stream) {
  tokens::launch_parameters(args, b, stream, cut);
}
void launch_tokens(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   const TokenRun& run, cudaStream_t stream) {
  tokens::launch_tokens(args, wave, b, run, stream, cut);
}

}  // namespace talea::mamba3::sm90::units
