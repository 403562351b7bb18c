// What: the forward kernel of lane sm90 for few heads of f16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/few_heads.cuh"

namespace talea::sparse_attention::sm90 {

void launch_few_heads_f16(const Forward& f, unsigned blocks, cudaStream_t stream) {
  launch_few_heads<true>(f, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
