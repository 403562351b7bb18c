// What: the kernels of lane sm90 for few queries and tensors of fp16: weights, then values.
// Why: apart from those of many queries: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/forward.cuh"
#include "ops/sparse_attention/sm90/values.cuh"

namespace talea::sparse_attention::sm90 {

void launch_scores_f16(const Forward& f, int half, unsigned blocks, cudaStream_t stream) {
  launch<true, true>(f, half, blocks, stream);
}
void launch_values_f16(const Forward& f, cudaStream_t stream) { launch_values<true>(f, stream); }

}  // namespace talea::sparse_attention::sm90
