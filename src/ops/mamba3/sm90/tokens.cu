// What: turns and steps of the tokens of heads that are units.
// Why: their kernels know that no head is cut.
// Never: forms what it leaves to units.hpp.
#include "ops/mamba3/sm90/tokens_launch.cuh"
#include "ops/mamba3/sm90/units.hpp"

namespace talea::mamba3::sm90 {

void launch_turns(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  int64_t most, cudaStream_t stream) {
  if (!cut.whole) return units::launch_turns(args, cut, wave, b, most, stream);
  tokens::launch_turns(args, wave, b, most, stream);
}

void launch_parameters(const Args& args, const Cut& cut, const UnitBuffers& b,
                       cudaStream_t stream) {
  if (!cut.whole) return units::launch_parameters(args, cut, b, stream);
  tokens::launch_parameters(args, b, stream);
}

void launch_tokens(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   const TokenRun& run, cudaStream_t stream) {
  if (!cut.whole) return units::launch_tokens(args, cut, wave, b, run, stream);
  tokens::launch_tokens(args, wave, b, run, stream);
}

}  // namespace talea::mamba3::sm90
