// What: what the lanes may know of the CUDA devices of this machine.
// Why: one place asks the driver; choices are pure functions of the answer.
// Never: throws; a machine without a GPU or driver is a fact with a reason.
#include <mutex>
#include <vector>

#include "core/device_facts.hpp"
#include "core/fail.hpp"
#include "device/common/cublaslt.hpp"
#include "device/common/cuda_check.hpp"

namespace talea {
namespace {

struct Known {
  bool asked = false;
  int sm = 0, sm_count = 0;
  int64_t shared_bytes = 0, l2_bytes = 0, memory_bytes = 0;
  int memory_mhz = 0, memory_bus_bits = 0;
  std::string name;
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

Known ask(int device) {
  const device::RelaxedCapture relaxed;
  Known k;
  k.asked = true;
  k.sm = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
  k.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
  k.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  k.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  k.memory_mhz = attribute(cudaDevAttrMemoryClockRate, device) / 1000;
  k.memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) {
    k.name = properties.name;
    k.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  }
  return k;
}

}  // namespace

void gather_cuda_facts(int device_index, DeviceFacts& facts) {
  facts.cuda_built = true;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    facts.cuda_problem =
        status == cudaSuccess ? "no CUDA device" : std::string(cudaGetErrorString(status));
    cudaGetLastError();
    return;
  }
  facts.cuda_devices = count;
  if (device_index < 0 || device_index >= count) {
    facts.cuda_problem = fmt::format("device {} of {} asked for", device_index, count);
    return;
  }
  static std::mutex mutex;
  static std::vector<Known> known;
  const std::lock_guard lock(mutex);
  if (known.size() < static_cast<size_t>(count)) known.resize(static_cast<size_t>(count));
  Known& k = known[static_cast<size_t>(device_index)];
  if (!k.asked) k = ask(device_index);
  facts.sm = k.sm;
  facts.sm_count = k.sm_count;
  facts.shared_bytes = k.shared_bytes;
  facts.l2_bytes = k.l2_bytes;
  facts.memory_bytes = k.memory_bytes;
  facts.memory_mhz = k.memory_mhz, facts.memory_bus_bits = k.memory_bus_bits;
  facts.device_name = k.name;
  facts.cublaslt_problem = device::cublaslt_problem();
}

int64_t free_device_bytes(int device_index) {
  int before = 0;
  size_t free = 0, all = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_index) != cudaSuccess) return 0;
  const bool known = cudaMemGetInfo(&free, &all) == cudaSuccess;
  cudaSetDevice(before);
  return known ? static_cast<int64_t>(free) : 0;
}

}  // namespace talea
