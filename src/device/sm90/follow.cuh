// What: launches a kernel ahead of the end of the one before it in the stream.
// Why: a small kernel's start hides behind the product before it.
// Never: used for a kernel that does not begin with begin_after_earlier_kernels().
#pragma once
#include "device/common/cuda_check.hpp"
#include "device/sm90/ptx.cuh"

namespace talea::sm90 {

struct Grid {
  int64_t blocks = 0;
  int threads = 0;
  bool follows = true;  // false: an ordinary launch
  int64_t layers = 1;   // blocks along y
};

template <class Params>
void launch_following(void (*kernel)(Params), const Grid& grid, const Params& params,
                      cudaStream_t stream, const char* name) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.layers));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = grid.follows ? 1 : 0;
  device::check(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace talea::sm90
