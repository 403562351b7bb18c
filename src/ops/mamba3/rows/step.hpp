// What: a step on any device lane: one token an entry, on states in place.
// Why: it moves the states and little else, which is nothing that lanes differ in.
// Never: allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/mamba3/rows/args.hpp"

namespace talea::mamba3::cuda {

void launch_step(const Args& args, cudaStream_t stream);

}  // namespace talea::mamba3::cuda
