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
  int64_t shared_bytes = 0;
  int cluster = 1;  // blocks
};

template <class Params>
void launch_following(void (*kernel)(Params), const Grid& grid, const Params& params,
                      cudaStream_t stream, const char* name) {
  if (grid.shared_bytes > 0)
    device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(grid.shared_bytes)),
                  name);
  cudaLaunchConfig_t config{};
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.layers));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (grid.follows) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  device::check(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace talea::sm90
