// What: the facts of a batch that follow from class weights and from sums over the rows; vectors in
// fp32.
// Why: what both lanes launch alike is launched from one place.
// Never: uses an atomic; every sum has a fixed order.
#include "device/common/cuda_check.hpp"
#include "ops/linear_cross_entropy/rows/tokens.cuh"

namespace talea::lce {
namespace {

using device::block_reduce;

__global__ void __launch_bounds__(1024)
    class_weight_kernel(View weights, int64_t vocab, BatchFacts* facts) {
  __shared__ double doubles[32];
  __shared__ int64_t integers[32];
  double sum = 0, most = 0;
  int64_t bad = BatchFacts::kNone;
  for (int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
    const double c = weights.load(v);
    if (!is_class_weight(c)) bad = device::Min()(bad, v);
    sum += c;
    most = fmax(most, c);
  }
  sum = block_reduce(sum, device::Sum(), doubles);
  most = block_reduce(most, device::Max(), doubles);
  bad = block_reduce(bad, device::Min(), integers);
  if (threadIdx.x != 0) return;
  facts->class_weight_sum = sum;
  facts->class_weight_max = most;
  if (bad == BatchFacts::kNone) return;
  facts->first_bad_weight = bad;
  facts->class_weight_sum = facts->valid_weight = facts->weighted = NAN;
}

__global__ void end_kernel(FactsEnd p) {
  set_denominator(*p.facts, p.mean);
  if (!p.terms) return;
  p.loss.class_weight_sum = p.facts->class_weight_sum;
  p.loss.inverse_denominator = p.facts->inverse;
  *p.terms = p.loss;
}

__global__ void convert_kernel(View from, int64_t first, int64_t count, float* to) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) to[i] = static_cast<float>(from.load(first + i));
}

}  // namespace

void sum_class_weights(const View& weights, int64_t vocab, BatchFacts* facts, cudaStream_t stream) {
  class_weight_kernel<<<1, 1024, 0, stream>>>(weights, vocab, facts);
  device::check_launch("sum_class_weights");
}

void end_facts(const FactsEnd& p, cudaStream_t stream) {
  end_kernel<<<1, 1, 0, stream>>>(p);
  device::check_launch("end_facts");
}

void convert_vector(const View& from, int64_t first, int64_t count, float* to,
                    cudaStream_t stream) {
  if (count == 0) return;
  convert_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(from, first, count,
                                                                                 to);
  device::check_launch("convert_vector");
}

}  // namespace talea::lce
