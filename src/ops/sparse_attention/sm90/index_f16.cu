// What: the kernels of lane sm90's index scores for tensors of fp16.
// Why: a file a type: they compile beside each other.
// Never: chooses a width.
#include "ops/sparse_attention/sm90/index_kernel.cuh"

namespace talea::sparse_attention::sm90 {

void launch_index_f16(const IndexScores& f, int heads, int64_t units, const CUtensorMap& keys,
                      cudaStream_t stream) {
  launch_index<IndexType::f16>(f, heads, units, keys, stream);
}

}  // namespace talea::sparse_attention::sm90
