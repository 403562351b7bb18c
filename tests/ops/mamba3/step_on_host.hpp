// What: the text of a step on a host: a block's threads have a stack each and take turns.
// Why: index arithmetic, sums over lanes and missing barriers show where there is no GPU.
// Never: says anything of launches or of what a device's arithmetic rounds.
#pragma once

#include "ops/mamba3/rows/args.hpp"

namespace talea::mamba3::cuda {

void step_on_host(const Args& args);

}  // namespace talea::mamba3::cuda
