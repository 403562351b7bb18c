// What: the kernels of lane sm90's index scores for tensors of e4m3.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/index_kernel.cuh"

namespace talea::sparse_attention::sm90 {

namespace {

__global__ void pack_kernel(View keys, int64_t b, int64_t pieces, int64_t dim, int64_t pitch,
                            char* to) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= pieces) return;
  const int64_t row = i * 8 / dim, column = i * 8 % dim;
  const char* from = static_cast<const char*>(keys.data) + cuda::offset(keys, b, row, 0, column);
  *reinterpret_cast<uint2*>(to + row * pitch + column) = *reinterpret_cast<const uint2*>(from);
}

}  // namespace

void pack_index_keys(const View& keys, int64_t b, int64_t rows, int64_t dim, int64_t pitch,
                     void* to, cudaStream_t stream) {
  constexpr int threads_each = 256;
  const int64_t pieces = rows * dim / 8;
  const auto blocks = static_cast<unsigned>((pieces + threads_each - 1) / threads_each);
  pack_kernel<<<blocks, threads_each, 0, stream>>>(keys, b, pieces, dim, pitch,
                                                   static_cast<char*>(to));
  device::check_launch("sparse_attention: packed index keys");
}

void launch_index_e4m3(const IndexScores& f, int heads, int64_t units, const CUtensorMap& keys,
                       cudaStream_t stream) {
  launch_index<IndexType::e4m3>(f, heads, units, keys, stream);
}

}  // namespace talea::sparse_attention::sm90
