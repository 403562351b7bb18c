// What: the launches of lane sm90 whose kernels know that heads are cut into units.
// Why: those of whole heads are compiled without a word of it, and stay what they are.
// Never: called for heads that are units.
#pragma once

#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3::sm90::units {

// As in machine.hpp.
void launch_turns(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                  int64_t most, cudaStream_t stream);
void launch_tokens(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   const TokenRun& run, cudaStream_t stream);
void launch_parameters(const Args& args, const Cut& cut, const UnitBuffers& b, cudaStream_t stream);
void launch_back(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                 cudaStream_t stream);
// Forward of `count` units: chunks [first, first + ahead) of each, or of a pack round `first`.
void launch_chunks(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   int64_t count, int64_t first, int64_t ahead, cudaStream_t stream);
// Chains of backward: h of `states` units, then E of `upstream`; or h alone, on the way `ahead`.
void launch_chains(const Args& args, const Cut& cut, const Wave& wave, const UnitBuffers& b,
                   int64_t states, int64_t upstream, bool ahead, cudaStream_t stream);

}  // namespace talea::mamba3::sm90::units
