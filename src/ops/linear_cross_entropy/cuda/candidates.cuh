// What: the k best logits of one part of a row, in falling order, ties to the lowest id.
// Why: the block that reduced the part knows each thread's maximum already; only winners look
// again.
// Never: orders NaN; reads the row once more as a whole.
#pragma once

#include "device/common/reduce.cuh"
#include "ops/linear_cross_entropy/cuda/logit.cuh"

namespace talea::lce::cuda {

using Best = Candidate<float>;

// One part of a row. A thread owns four neighbouring columns of every 4 * blockDim.x.
struct Part {
  const float* columns;
  int64_t begin;  // local column of the part's first
  int width;
};

// This thread's best column that comes after `last` in the order.
__device__ inline Best own_best(const Shape& s, const Part& p, float scale, const Best& last) {
  Best best{-INFINITY, INT64_MAX};
  for (int v = threadIdx.x * 4; v < p.width; v += blockDim.x * 4)
    for (int i = 0; i < 4 && v + i < p.width; ++i) {
      const int64_t column = p.begin + v + i;
      const Best here{logit_of(s, p.columns[v + i], scale, column), s.vocab_begin + column};
      if (better(here, best) && better(last, here)) best = here;
    }
  return best;
}

// Every thread gets the best of the block; `shared` holds one a warp.
__device__ inline Best block_best(Best mine, Best* shared) {
  for (int offset = device::warp_size / 2; offset > 0; offset /= 2) {
    const Best other{__shfl_xor_sync(device::whole_warp, mine.value, offset),
                     __shfl_xor_sync(device::whole_warp, mine.id, offset)};
    if (better(other, mine)) mine = other;
  }
  if (threadIdx.x % device::warp_size == 0) shared[threadIdx.x / device::warp_size] = mine;
  __syncthreads();
  Best all = shared[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / device::warp_size; ++w)
    if (better(shared[w], all)) all = shared[w];
  __syncthreads();
  return all;
}

// By rounds: the winner of each looks again. Slow, and right for any number of ties.
__device__ inline void candidates_by_rounds(const Shape& s, const Part& p, float scale, Best* out,
                                            Best* shared) {
  Best mine = own_best(s, p, scale, {INFINITY, -1});
  for (int64_t j = 0; j < s.kept; ++j) {
    const Best last = block_best(mine, shared);
    if (threadIdx.x == 0) out[j] = last;
    if (last.id == mine.id && j + 1 < s.kept) mine = own_best(s, p, scale, last);
  }
}

constexpr int listed_candidates = 256;
struct CandidateList {
  Best entries[listed_candidates];
  Best warps[32];
  float groups[32];
  int count;
};

// A value that at least `kept` <= 32 of the part's logits reach: of the maxima of 32 groups of
// threads, the largest that as many reach. The block is 256 threads.
__device__ inline float threshold(float most, int64_t kept, float* groups) {
  for (int offset = 1; offset < 8; offset *= 2)
    most = fmaxf(most, __shfl_xor_sync(device::whole_warp, most, offset));
  if (threadIdx.x % 8 == 0) groups[threadIdx.x / 8] = most;
  __syncthreads();
  const float mine = groups[threadIdx.x % 32];
  int reach = 0;
#pragma unroll
  for (int g = 0; g < 32; ++g) reach += groups[g] >= mine;
  return device::warp_reduce(reach >= kept ? mine : -INFINITY, device::Max());
}

// Lists the logits of the warp's threads that reach `least`; the order of the list does not matter.
// The few threads that have one are served by the whole warp: two lanes a group of four columns.
__device__ inline void list_reaching(const Shape& s, const Part& p, float scale, float most,
                                     float least, CandidateList& list) {
  const int step = blockDim.x * 4, lane = threadIdx.x % device::warp_size;
  unsigned reaching = __ballot_sync(device::whole_warp, most >= least);
  for (; reaching != 0; reaching &= reaching - 1) {
    const int owner = threadIdx.x - lane + __ffs(static_cast<int>(reaching)) - 1;
    for (int v = owner * 4 + lane / 2 * step + lane % 2 * 2; v < p.width; v += 16 * step) {
      const float2 raw = *reinterpret_cast<const float2*>(p.columns + v);  // rows are padded
      const float two[2] = {raw.x, raw.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (v + i >= p.width) continue;
        const int64_t column = p.begin + v + i;
        const float z = logit_of(s, two[i], scale, column);
        if (!(z >= least)) continue;
        const int at = atomicAdd(&list.count, 1);
        if (at < listed_candidates) list.entries[at] = {z, s.vocab_begin + column};
      }
    }
  }
}

// The whole block of 256 threads; `most`: the largest of this thread's logits, NaN aside. Few
// threads hold a logit that reaches the threshold: they list theirs at once, and the list is put in
// order.
__device__ inline void find_candidates(const Shape& s, const Part& p, float scale, float most,
                                       Best* out, CandidateList& list) {
  if (threadIdx.x == 0) list.count = 0;
  const float least = threshold(most, s.kept, list.groups);
  list_reaching(s, p, scale, most, least, list);
  __syncthreads();
  if (list.count > listed_candidates) return candidates_by_rounds(s, p, scale, out, list.warps);
  // An entry's place is the number of better ones: no two are equal, since their ids differ.
  const int entry = static_cast<int>(threadIdx.x);
  if (entry < list.count) {
    const Best mine = list.entries[entry];
    int place = 0;
    for (int e = 0; e < list.count; ++e) place += better(list.entries[e], mine);
    if (place < s.kept) out[place] = mine;
  }
  // A part of fewer columns than are wanted has no more.
  for (int64_t j = list.count + entry; j < s.kept; j += blockDim.x) out[j] = {-INFINITY, INT64_MAX};
}

}  // namespace talea::lce::cuda
