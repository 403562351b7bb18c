// What: gathers what lanes may know of the machine.
// Why: one place asks the machine; everything else is a pure function of the answer.
// Never: decides anything.
#include "core/device_facts.hpp"

#include <omp.h>

namespace talea {

#ifdef TALEA_WITH_CUDA
void gather_cuda_facts(int device_index, DeviceFacts& facts);  // src/device/common/facts.cpp
#else
static void gather_cuda_facts(int, DeviceFacts&) {}
int64_t free_device_bytes(int) { return 0; }
#endif
void gather_cpu_facts(DeviceFacts& facts);  // src/core/cpu_facts.cpp

DeviceFacts gather_device_facts(int device_index) {
  DeviceFacts facts;
  facts.threads = omp_get_max_threads();
  gather_cpu_facts(facts);
  gather_cuda_facts(device_index, facts);
  return facts;
}

}  // namespace talea
