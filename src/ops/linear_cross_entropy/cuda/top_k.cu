// What: the k best logits of every (row, part) of a chunk, in falling order, ties to the lowest id.
// Why: argmax, accuracy and top-k come out of the same chunk as the loss.
// Never: orders NaN; writes the logits.
#include "device/common/cuda_check.hpp"
#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {
namespace {

constexpr int threads = 256;
using Best = Candidate<float>;

struct Better {
  __device__ Best operator()(const Best& a, const Best& b) const { return better(b, a) ? b : a; }
};

__device__ Best shuffle(const Best& b, int offset) {
  return {__shfl_xor_sync(device::whole_warp, b.value, offset),
          __shfl_xor_sync(device::whole_warp, b.id, offset)};
}

// This thread's best column that comes after `last` in the order.
__device__ Best next_best(const Shape& s, const float* row, int64_t begin, int64_t end, float scale,
                          const Best& last) {
  Best best{-INFINITY, INT64_MAX};
#pragma unroll 4
  for (int64_t v = begin + threadIdx.x; v < end; v += threads) {
    const Best here{logit_of(s, row[v], scale, v), s.vocab_begin + v};
    if (better(here, best) && better(last, here)) best = here;
  }
  return best;
}

__device__ Best block_best(Best mine, Best* shared) {
  for (int offset = device::warp_size / 2; offset > 0; offset /= 2)
    mine = Better()(mine, shuffle(mine, offset));
  if (threadIdx.x % device::warp_size == 0) shared[threadIdx.x / device::warp_size] = mine;
  __syncthreads();
  Best all = shared[0];
  for (int w = 1; w < threads / device::warp_size; ++w) all = Better()(all, shared[w]);
  __syncthreads();
  return all;
}

// Each thread keeps the best of its own columns; only the winner of a round looks again.
__global__ void __launch_bounds__(threads)
    top_k_kernel(Shape s, ChunkRows c, const float* logits, Best* partial) {
  __shared__ Best shared[threads / device::warp_size];
  const int64_t part = blockIdx.x % s.parts, r = blockIdx.x / s.parts;
  if (!is_row(c, r)) return;
  const float scale = row_scale(s, c.order[c.begin + r]);
  const int64_t begin = part * part_columns;
  const int64_t end = begin + part_columns < s.vocab_local ? begin + part_columns : s.vocab_local;
  const float* row = logits + r * s.logits_stride;
  Best* out = partial + (part * c.rows + r) * s.kept;
  Best mine = next_best(s, row, begin, end, scale, {INFINITY, -1});
  for (int64_t j = 0; j < s.kept; ++j) {
    const Best won = block_best(mine, shared);
    if (threadIdx.x == 0) out[j] = won;
    if (j + 1 < s.kept && won.id == mine.id && won.id != INT64_MAX)
      mine = next_best(s, row, begin, end, scale, won);
  }
}

}  // namespace

void find_candidates(const Shape& s, const ChunkRows& c, const float* logits, Best* partial,
                     cudaStream_t stream) {
  if (s.kept == 0) return;
  top_k_kernel<<<static_cast<unsigned>(c.rows * s.parts), threads, 0, stream>>>(s, c, logits,
                                                                                partial);
  device::check_launch("find_candidates");
}

}  // namespace talea::lce::cuda
