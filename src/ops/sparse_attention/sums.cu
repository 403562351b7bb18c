// What: the fp32 sums of dkv: cleared before, and rounded into the caller's dkv after.
// Why: every CUDA lane sums in fp32 whatever the caller's type is.
// Never: allocates or synchronises.
#include <algorithm>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sums.cuh"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

struct Extent {
  int64_t n[4];
};
__device__ int64_t element_of(const View& v, const Extent& e, int64_t i) {
  const int64_t c = i % e.n[3], h = i / e.n[3] % e.n[2], r = i / e.n[3] / e.n[2] % e.n[1];
  return offset(v, i / e.n[3] / e.n[2] / e.n[1], r, h, c);
}

__global__ void zero_kernel(View v, Extent e, int64_t all) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x)
    put(v, element_of(v, e, i), 0.0f);
}

__global__ void convert_kernel(View from, View to, Extent e, int64_t all) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * blockDim.x)
    put(to, element_of(to, e, i), number_at(from, element_of(from, e, i)));
}

unsigned blocks_of(int64_t all) {
  return static_cast<unsigned>(std::min<int64_t>((all + threads - 1) / threads, 65536));
}

}  // namespace

void fill_zero(const View& v, const int64_t (&extent)[4], cudaStream_t stream) {
  const Extent e = {{extent[0], extent[1], extent[2], extent[3]}};
  const int64_t all = e.n[0] * e.n[1] * e.n[2] * e.n[3];
  if (all == 0) return;
  zero_kernel<<<blocks_of(all), threads, 0, stream>>>(v, e, all);
  device::check_launch("sparse_attention: zero");
}

void convert(const View& from, const View& to, const int64_t (&extent)[4], cudaStream_t stream) {
  const Extent e = {{extent[0], extent[1], extent[2], extent[3]}};
  const int64_t all = e.n[0] * e.n[1] * e.n[2] * e.n[3];
  if (all == 0) return;
  convert_kernel<<<blocks_of(all), threads, 0, stream>>>(from, to, e, all);
  device::check_launch("sparse_attention: convert");
}

}  // namespace talea::sparse_attention::cuda
