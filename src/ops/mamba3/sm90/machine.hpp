// What: the launches of lane sm90 on a stream of the current device.
// Why: rows/run.cpp says in which order; this is where its chunks become Hopper kernels.
// Never: allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/mamba3/rows/args.hpp"

namespace talea::mamba3::sm90 {

using cuda::Args;
using cuda::UnitBuffers;
using cuda::Wave;

void launch_forward(const Args& args, cudaStream_t stream);
void launch_begin(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
void launch_segment(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
// E of a slice, where launch_segment has not had it.
void launch_upstream(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
void launch_back(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
// d_q and d_k of a segment, d_angles that heads share, and its share of the parameters.
void launch_sums(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);
// d_dt and d_trap of the first token of each chunk, once all chunks are through.
void launch_edges(const Args& args, const Wave& wave, const UnitBuffers& b, cudaStream_t stream);

}  // namespace talea::mamba3::sm90
