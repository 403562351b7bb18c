// What: index scores from the products of the heads.
// Why: heads are summed in fp32 in their order; what the bounds leave out weighs nothing.
// Never: selects.
#include <math_constants.h>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256;

__global__ void combine_kernel(Scores m, Chunk c, const float* products, float* to) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.n * m.columns) return;
  const int64_t row = i / m.columns, column = i % m.columns, s = c.s + row;
  const int64_t key = m.first_key + column;
  const Bounds bounds = index_bounds(m.tables, c.b, s);
  float sum = -CUDART_INF_F;
  if (key >= bounds.begin && key < bounds.end) {
    sum = 0;
    for (int64_t h = 0; h < c.heads; ++h) {
      const float z = products[(row * c.heads + h) * m.columns + column];
      float w = number_at(m.tables.weights, offset(m.tables.weights, c.b, s, h));
      if (m.tables.q_scale.present)
        w *= number_at(m.tables.q_scale, offset(m.tables.q_scale, c.b, s, h));
      sum += w * (m.relu && z <= 0 ? 0.0f : z);  // a comparison with NaN is false: NaN stays
    }
    if (m.tables.k_scale.present)
      sum *= number_at(m.tables.k_scale, offset(m.tables.k_scale, c.b, key));
  }
  if (mutant(Mutant::sa37_scores_zero_in_long_rows) && key >= 256) sum = 0;
  to[row * m.keys + key] = sum;
}

}  // namespace

void combine(const Scores& scores, const Chunk& chunk, const float* products, float* to,
             cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((chunk.n * scores.columns + threads - 1) / threads);
  if (blocks == 0) return;
  combine_kernel<<<blocks, threads, 0, stream>>>(scores, chunk, products, to);
  device::check_launch("sparse_attention: combine");
}

}  // namespace talea::sparse_attention::cuda
