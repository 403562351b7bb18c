// What: the launches of lane cuda's chunks on a stream of the current device.
// Why: rows/run.cpp says in which order; this is where they become kernels.
// Never: allocates or synchronises.
#pragma once

#include "ops/mamba3/rows/machine.hpp"

namespace talea::mamba3::cuda {

void launch_forward(const Launch& at, const Args& args);
void launch_begin(const Launch& at, const Args& args, const Wave& wave);
void launch_segment(const Launch& at, const Args& args, const Wave& wave);
void launch_back(const Launch& at, const Args& args, const Wave& wave);

}  // namespace talea::mamba3::cuda
