// What: the kernels of lane sm90 for few queries and tensors of bf16: scores, then values.
// Why: apart from those of many queries: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/forward.cuh"
#include "ops/sparse_attention/sm90/values.cuh"

namespace talea::sparse_attention::sm90 {

void launch_scores_bf16(const Forward& f, int half, unsigned blocks, cudaStream_t stream) {
  if (f.rows == Rows::shared) return launch_half<256, false, Rows::shared, true>(f, blocks, stream);
  if (f.rows == Rows::packed) return launch_half<256, false, Rows::packed, true>(f, blocks, stream);
  launch<false, true>(f, half, blocks, stream);
}
void launch_values_bf16(const Forward& f, cudaStream_t stream) { launch_values<false>(f, stream); }

}  // namespace talea::sparse_attention::sm90
