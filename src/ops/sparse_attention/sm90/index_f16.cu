// What: the kernels of lane sm90's index scores for tensors of fp16, and of e4m3 as fp16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/index_scores.cuh"

namespace talea::sparse_attention::sm90 {

namespace {

__global__ void widen_kernel(View keys, int64_t b, int64_t pieces, int64_t dim, uint4* to) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= pieces) return;
  const int64_t column = i * 8 % dim;
  const char* from =
      static_cast<const char*>(keys.data) + cuda::offset(keys, b, i * 8 / dim, 0, column);
  to[i] = index::widened(*reinterpret_cast<const uint2*>(from));
}

}  // namespace

void widen_keys(const View& keys, int64_t b, int64_t rows, int64_t dim, void* to,
                cudaStream_t stream) {
  constexpr int threads_each = 256;
  const int64_t pieces = rows * dim / 8;
  const auto blocks = static_cast<unsigned>((pieces + threads_each - 1) / threads_each);
  widen_kernel<<<blocks, threads_each, 0, stream>>>(keys, b, pieces, dim, static_cast<uint4*>(to));
  device::check_launch("sparse_attention: index keys in fp16");
}

void launch_index_f16(const IndexScores& f, int heads, int64_t units, const CUtensorMap& keys,
                      cudaStream_t stream) {
  launch_index<true>(f, heads, units, keys, stream);
}

}  // namespace talea::sparse_attention::sm90
