// What: the launches of lane cuda on a stream of the current device.
// Why: run.cpp says in which order; this is where they become kernels.
// Never: allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "ops/mamba3/cuda/run.hpp"

namespace talea::mamba3::cuda {

std::unique_ptr<Machine> make_machine(const Plan& plan, const Buffers& buffers,
                                      cudaStream_t stream);

// A kernel of one of the engines, with all that it may need.
struct Launch {
  const Plan& plan;
  const Buffers& buffers;
  cudaStream_t stream;
};
void launch_forward(const Launch& at, const Args& args);
void launch_begin(const Launch& at, const Args& args, const Wave& wave);
void launch_segment(const Launch& at, const Args& args, const Wave& wave);
void launch_back(const Launch& at, const Args& args, const Wave& wave);

}  // namespace talea::mamba3::cuda
