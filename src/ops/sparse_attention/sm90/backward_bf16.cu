// What: the kernels of lane sm90's backward pass for tensors of bf16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/backward.cuh"
#include "ops/sparse_attention/sm90/sums.cuh"

namespace talea::sparse_attention::sm90 {

void launch_backward_bf16(const Backward& b, unsigned blocks, cudaStream_t stream) {
  launch_backward<false>(b, blocks, stream);
}

void launch_sums_bf16(const Backward& b, unsigned blocks, cudaStream_t stream) {
  launch_sums<false>(b, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
