// What: fills device tensors with normal numbers and ids that depend on seed and index alone.
// Why: benches and tests need gigabytes of random data without crossing the bus.
// Never: used by a lane.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/common/cuda_check.hpp"
#include "device/common/random.hpp"

namespace talea::device {
namespace {

// A 64-bit finaliser with good avalanche: neighbouring indices give unrelated numbers.
__device__ uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ void put(float* to, float x) { *to = x; }
__device__ void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
__device__ void put(__half* to, float x) { *to = __float2half(x); }

template <typename T>
__global__ void normal_kernel(T* to, int64_t count, uint64_t seed, float deviation) {
  const int64_t all = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += all) {
    const uint64_t bits = mix(mix(seed) ^ static_cast<uint64_t>(i));
    const float u = (static_cast<uint32_t>(bits >> 40) + 1) * 0x1p-24f;
    const float v = static_cast<uint32_t>(bits & 0xffffff) * 0x1p-24f;
    put(to + i, deviation * sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

__global__ void ids_kernel(int64_t* to, int64_t count, uint64_t seed, int64_t bound) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count)
    to[i] = static_cast<int64_t>(mix(mix(seed) ^ static_cast<uint64_t>(i)) >> 1) % bound;
}

}  // namespace

void fill_normal(void* to, DType dtype, int64_t count, uint64_t seed, float deviation,
                 cudaStream_t stream) {
  constexpr unsigned blocks = 2048, threads = 256;
  if (dtype == DType::bf16)
    normal_kernel<<<blocks, threads, 0, stream>>>(static_cast<__nv_bfloat16*>(to), count, seed,
                                                  deviation);
  else if (dtype == DType::f16)
    normal_kernel<<<blocks, threads, 0, stream>>>(static_cast<__half*>(to), count, seed, deviation);
  else
    normal_kernel<<<blocks, threads, 0, stream>>>(static_cast<float*>(to), count, seed, deviation);
  check_launch("fill_normal");
}

void fill_ids(int64_t* to, int64_t count, uint64_t seed, int64_t bound, cudaStream_t stream) {
  if (count == 0) return;
  ids_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(to, count, seed,
                                                                             bound);
  check_launch("fill_ids");
}

}  // namespace talea::device
