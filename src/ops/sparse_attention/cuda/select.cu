// What: index scores from their products, and the selection of the best keys of a row.
// Why: exact, ties to the lower key, the same keys in every run: a radix select of counted bins.
// Never: keeps candidates in a buffer that could overflow, or lets arrival order decide.
#include <math_constants.h>

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {
namespace {

constexpr int threads = 256, select_threads = 1024, bins = 256;

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
  to[row * m.keys + key] = sum;
}

// Larger is better: NaN first, then by value, -0 as +0; 0 stands for -Inf, which is no candidate.
__device__ uint32_t rank_of(float score) {
  if (isnan(score)) return 0xffffffffu;
  if (score == -CUDART_INF_F) return 0;
  const uint32_t bits = __float_as_uint(score == 0 ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Number of threads before this one whose flag is set, and of all of the block.
struct Ranked {
  int before = 0, all = 0;
};
__device__ Ranked rank_in_block(bool flag, int* warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
  const unsigned set = __ballot_sync(0xffffffffu, flag);
  if (lane == 0) warps[warp] = __popc(set);
  __syncthreads();
  Ranked r;
  for (int w = 0; w < count; ++w) {
    if (w < warp) r.before += warps[w];
    r.all += warps[w];
  }
  r.before += __popc(set & ((1u << lane) - 1u));
  __syncthreads();
  return r;
}

// The rank of the k-th best, and how many of exactly that rank are still wanted.
struct Threshold {
  uint32_t rank = 0;
  int64_t equal = 0;
};

__device__ Threshold find_threshold(const float* scores, int64_t keys, int64_t wanted,
                                    unsigned* counts, Threshold* shared) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < bins; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < keys; i += blockDim.x) {
      const uint32_t rank = rank_of(scores[i]);
      if (rank != 0 && (rank & mask) == prefix) atomicAdd(&counts[(rank >> shift) & 0xffu], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t left = wanted;
      int bin = bins - 1;
      while (bin > 0 && counts[bin] < left) left -= counts[bin--];
      shared->rank = prefix | static_cast<uint32_t>(bin) << shift;
      shared->equal = left;
    }
    __syncthreads();
    prefix = shared->rank;
    wanted = shared->equal;
    mask |= 0xffu << shift;
    __syncthreads();
  }
  return {prefix, wanted};
}

__global__ void select_kernel(Selected m, Chunk c, const float* scores, Counters* counters) {
  __shared__ unsigned counts[bins];
  __shared__ int warps[select_threads / 32];
  __shared__ Threshold shared;
  __shared__ unsigned long long candidates, nan_scores;
  const int64_t row = blockIdx.x, s = c.s + row;
  const float* list = scores + row * m.keys;
  if (threadIdx.x == 0) candidates = nan_scores = 0;
  __syncthreads();
  unsigned long long mine = 0, nans = 0;
  for (int64_t i = threadIdx.x; i < m.keys; i += blockDim.x) {
    mine += rank_of(list[i]) != 0;
    nans += isnan(list[i]);
  }
  if (mine) atomicAdd(&candidates, mine);
  if (nans) atomicAdd(&nan_scores, nans);
  __syncthreads();
  const int64_t wanted = min(static_cast<int64_t>(candidates), m.top_k);
  Threshold limit = {1, static_cast<int64_t>(candidates)};  // all candidates
  if (static_cast<int64_t>(candidates) > m.top_k && m.top_k > 0)
    limit = find_threshold(list, m.keys, wanted, counts, &shared);
  int64_t written = 0, equal = 0;
  for (int64_t base = 0; base < m.keys && written < wanted; base += blockDim.x) {
    const int64_t i = base + threadIdx.x;
    const uint32_t rank = i < m.keys ? rank_of(list[i]) : 0;
    const Ranked same = rank_in_block(rank == limit.rank && rank != 0, warps);
    const bool taken = rank != 0 && (rank > limit.rank ||
                                     (rank == limit.rank && equal + same.before < limit.equal));
    const Ranked place = rank_in_block(taken, warps);
    if (taken) {
      const int64_t at = written + place.before;
      if (m.indices.present)
        static_cast<int32_t*>(m.indices.data)[offset(m.indices, c.b, s, 0, at)] =
            static_cast<int32_t>(i);
      if (m.scores.present) put(m.scores, offset(m.scores, c.b, s, 0, at), list[i]);
    }
    written += place.all;
    equal += same.all;
  }
  for (int64_t at = wanted + threadIdx.x; at < m.top_k; at += blockDim.x) {
    if (m.indices.present)
      static_cast<int32_t*>(m.indices.data)[offset(m.indices, c.b, s, 0, at)] = -1;
    if (m.scores.present) put(m.scores, offset(m.scores, c.b, s, 0, at), -CUDART_INF_F);
  }
  if (threadIdx.x != 0) return;
  if (m.length.present)
    static_cast<int32_t*>(m.length.data)[offset(m.length, c.b, s)] = static_cast<int32_t>(wanted);
  if (nan_scores) atomicAdd(&counters->nan_scores, nan_scores);
}

}  // namespace

void combine(const Scores& scores, const Chunk& chunk, const float* products, float* to,
             cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((chunk.n * scores.columns + threads - 1) / threads);
  if (blocks == 0) return;
  combine_kernel<<<blocks, threads, 0, stream>>>(scores, chunk, products, to);
  device::check_launch("sparse_attention: combine");
}

void select_top(const Selected& selected, const Chunk& chunk, const float* scores,
                Counters* counters, cudaStream_t stream) {
  if (chunk.n == 0) return;
  select_kernel<<<static_cast<unsigned>(chunk.n), select_threads, 0, stream>>>(selected, chunk,
                                                                               scores, counters);
  device::check_launch("sparse_attention: select");
}

}  // namespace talea::sparse_attention::cuda
