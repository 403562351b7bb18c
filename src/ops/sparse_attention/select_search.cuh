// What: the search for the last rank that a selection takes: scores as ranks, digits of ranks counted
// by a block.
// Why: a radix select is exact, and counts know no order of arrival.
// Never: knows how a row is read.
#pragma once

#include "device/common/reduce.cuh"
#include "ops/sparse_attention/select_rows.hpp"

namespace talea::sparse_attention::cuda::rows {

using device::whole_warp;

inline constexpr int most_threads = 1024, warp_words = 32;  // a thread keeps a word's worth of keys
inline constexpr int passes = 4, digits = 256;              // of a rank, 8 bits each
inline constexpr unsigned listed_most = 4096;
inline constexpr unsigned sampled = 8;  // one of so many keys is in the sample

// Larger is better: NaN first, then by value, -0 as +0. Ranks below `least` are no candidates:
// -Inf, and 0 where there is no key.
inline constexpr uint32_t least = 0x00800000u, of_nan = 0xffffffffu;
__device__ inline uint32_t rank_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // any NaN becomes the positive one
  if (mutant(Mutant::sa15_scores_in_half) && fabsf(score) > 65504.0f)
    return score > 0 ? 0xff800000u : least;
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// The digit of the wanted-th largest, how many of it are wanted and how many there are.
struct Digit {
  unsigned digit, wanted, there;
};

struct Shared {
  unsigned counts[3][passes][digits];  // of the sample, the list, the whole row
  uint32_t list[listed_most];
  unsigned sums[2][32];
  unsigned candidates, nans, listed, top;
  Digit found;
  int64_t bounds[2][2];  // begin and end of the rows to come
};

__device__ inline unsigned add_up_warp(unsigned x) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned other = __shfl_up_sync(whole_warp, x, by);
    if (threadIdx.x % 32 >= by) x += other;
  }
  return x;
}

// By one warp.
__device__ inline void find_digit(const unsigned (&counts)[digits], unsigned wanted, Digit& found) {
  constexpr int each = digits / 32;
  const int first = digits - each * (static_cast<int>(threadIdx.x) % 32 + 1);
  unsigned own[each], sum = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) sum += own[i] = counts[first + i];
  const unsigned through = add_up_warp(sum), before = through - sum;
  if (through < wanted || before >= wanted) return;
  unsigned left = wanted - before;
  int i = each - 1;
#pragma unroll
  for (int n = each - 1; n > 0; --n)
    if (i == n && own[n] < left) left -= own[n], --i;
  unsigned there = own[0];
#pragma unroll
  for (int n = 1; n < each; ++n)
    if (i == n) there = own[n];
  found = {static_cast<unsigned>(first + i), left, there};
}

// Ranks from `rank` on are taken, of `rank` itself the first `wanted` of the `there` keys.
struct Threshold {
  uint32_t rank = least;
  unsigned wanted = 0, there = 0;
};

// The search for the wanted-th largest of ranks from `low` on, digit by digit.
struct Search {
  uint32_t low, prefix = 0, above = 0;  // prefix: of rank - low; above: which bits of it
  int shift;
  __device__ Search(uint32_t from, uint32_t high) : low(from) {
    shift = max(32 - __clz(static_cast<int>(high - from)) - 8, 0);
  }
  __device__ void count(uint32_t rank, unsigned (&counts)[digits]) const {
    const uint32_t r = rank - low;
    if ((r & above) == prefix) atomicAdd(&counts[(r - prefix) >> shift], 1u);
  }
};

// Where the first digits are counted already. each(f) calls f with every rank that this thread has,
// none beyond the search's range; `wanted` of them at least. Ends early where no more than `spare`
// too many are taken. The other counts are zero.
template <typename Each>
__device__ inline Threshold find_from(Search search, Each&& each, unsigned wanted, unsigned spare,
                                      unsigned (&counts)[passes][digits], Digit& found) {
  Digit d;
#pragma unroll 1
  for (int pass = 0;; ++pass) {
    __syncthreads();
    if (threadIdx.x < 32) find_digit(counts[pass], wanted, found);
    __syncthreads();
    d = found;
    wanted = d.wanted;
    search.prefix |= d.digit << search.shift;
    if (search.shift == 0 || d.there <= d.wanted + spare) break;
    search.above = ~uint32_t{0} << search.shift;
    search.shift = max(search.shift - 8, 0);
    each([&](uint32_t rank) { search.count(rank, counts[pass + 1]); });
  }
  return {search.low + search.prefix, d.wanted, d.there};
}
template <typename Each>
__device__ inline Threshold find_threshold(uint32_t low, uint32_t high, Each&& each,
                                           unsigned wanted, unsigned (&counts)[passes][digits],
                                           Digit& found) {
  const Search search(low, high);
  each([&](uint32_t rank) { search.count(rank, counts[0]); });
  return find_from(search, each, wanted, 0, counts, found);
}

struct Before {
  unsigned before = 0, all = 0;
};
template <int kThreads>
__device__ inline Before add_up(unsigned x, unsigned (&sums)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned through = add_up_warp(x);
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  const unsigned sum = lane < kThreads / 32 ? sums[lane] : 0;
  const unsigned earlier = __reduce_add_sync(whole_warp, lane < warp ? sum : 0);
  return {earlier + through - x, __reduce_add_sync(whole_warp, sum)};
}

}  // namespace talea::sparse_attention::cuda::rows
