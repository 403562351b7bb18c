// What: the kernels of lane sm90 for few queries and tensors of bf16: weights, values.
// Why: apart from those of many queries: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/forward.cuh"
#include "ops/sparse_attention/sm90/packed_scores.cuh"
#include "ops/sparse_attention/sm90/values.cuh"

namespace talea::sparse_attention::sm90 {

void launch_unknown(const Forward& f, cudaStream_t stream) { mark_unknown(f, stream); }
void launch_scores_bf16(const Forward& f, int half, unsigned blocks, cudaStream_t stream) {
  launch<false, true>(f, half, blocks, stream);
}
void launch_packed_scores_bf16(const Forward& f, unsigned blocks, cudaStream_t stream) {
  launch_packed_scores(f, blocks, stream);
}
void launch_values_bf16(const Forward& f, cudaStream_t stream) { launch_values<false>(f, stream); }

}  // namespace talea::sparse_attention::sm90
