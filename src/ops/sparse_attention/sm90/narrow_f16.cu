// What: the forward kernels of lane sm90 for narrow rows of f16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/narrow.cuh"

namespace talea::sparse_attention::sm90 {

void launch_narrow_f16(const Forward& f, unsigned blocks, cudaStream_t stream) {
  launch_narrow<true>(f, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
