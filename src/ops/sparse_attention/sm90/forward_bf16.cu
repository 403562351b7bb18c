// What: the kernels of lane sm90's forward pass for tensors of bf16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/forward.cuh"

namespace talea::sparse_attention::sm90 {

void launch_bf16(const Forward& f, int half, unsigned blocks, cudaStream_t stream) {
  if (f.rows == Rows::shared) return launch_half<256, false, Rows::shared>(f, blocks, stream);
  if (f.rows == Rows::packed) return launch_half<256, false, Rows::packed>(f, blocks, stream);
  launch<false>(f, half, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
