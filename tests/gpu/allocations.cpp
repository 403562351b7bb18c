// What: counts the runtime's allocation calls of the whole program (the linker wraps them).
// Why: "no allocation" is proved by counting, not by reading.
// Never: changes what they do.
#include <cuda_runtime_api.h>

#include <atomic>

#include "gpu/batch.hpp"

namespace {
std::atomic<int64_t> calls{0};
}

extern "C" {
cudaError_t __real_cudaMalloc(void** p, size_t n);
cudaError_t __wrap_cudaMalloc(void** p, size_t n) {
  ++calls;
  return __real_cudaMalloc(p, n);
}
cudaError_t __real_cudaMallocAsync(void** p, size_t n, cudaStream_t s);
cudaError_t __wrap_cudaMallocAsync(void** p, size_t n, cudaStream_t s) {
  ++calls;
  return __real_cudaMallocAsync(p, n, s);
}
cudaError_t __real_cudaMallocManaged(void** p, size_t n, unsigned flags);
cudaError_t __wrap_cudaMallocManaged(void** p, size_t n, unsigned flags) {
  ++calls;
  return __real_cudaMallocManaged(p, n, flags);
}
cudaError_t __real_cudaMallocHost(void** p, size_t n);
cudaError_t __wrap_cudaMallocHost(void** p, size_t n) {
  ++calls;
  return __real_cudaMallocHost(p, n);
}
cudaError_t __real_cudaHostAlloc(void** p, size_t n, unsigned flags);
cudaError_t __wrap_cudaHostAlloc(void** p, size_t n, unsigned flags) {
  ++calls;
  return __real_cudaHostAlloc(p, n, flags);
}
cudaError_t __real_cudaFree(void* p);
cudaError_t __wrap_cudaFree(void* p) {
  ++calls;
  return __real_cudaFree(p);
}
}

namespace talea::gpu {
int64_t counted_allocations() { return calls; }
}  // namespace talea::gpu
