// Asks the CUDA runtime what the device is.
// Exists so that a machine without a GPU gives a reason instead of an error.
// Never creates a context: only counts and attributes are read.
#include <cuda_runtime.h>

#include "core/device_facts.hpp"

namespace talea {

void gather_cuda_facts(int device_index, DeviceFacts& facts) {
  facts.cuda_built = true;
  const cudaError_t status = cudaGetDeviceCount(&facts.cuda_devices);
  if (status != cudaSuccess) {
    facts.cuda_devices = 0;
    facts.cuda_problem = std::string("no CUDA device: ") + cudaGetErrorString(status);
    cudaGetLastError();
    return;
  }
  if (device_index < 0 || device_index >= facts.cuda_devices) return;
  auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    cudaDeviceGetAttribute(&value, which, device_index);
    return value;
  };
  facts.sm = attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
             attribute(cudaDevAttrComputeCapabilityMinor);
  facts.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  facts.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.l2_bytes = attribute(cudaDevAttrL2CacheSize);
}

}  // namespace talea
