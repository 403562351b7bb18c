// What: the kernels of lane sm90's backward pass for tensors of fp16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/backward.cuh"
#include "ops/sparse_attention/sm90/sums.cuh"

namespace talea::sparse_attention::sm90 {

void launch_backward_f16(const Backward& b, unsigned blocks, cudaStream_t stream) {
  launch_backward<true>(b, blocks, stream);
}

void launch_sums_f16(const Backward& b, unsigned blocks, cudaStream_t stream) {
  launch_sums<true>(b, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
