// What: runs of equal targets among sorted (target, row) keys.
// Why: what rows of one target add to its gradient is added in the order of the rows.
// Never: sorts.
#pragma once
#include <cstdint>

namespace talea::lce {

// The target whose run begins at key `first`, or -1: its run began before, or there is none.
__device__ __forceinline__ int64_t run_at(const uint64_t* sorted, int64_t first, int in_use) {
  if (first >= in_use) return -1;
  const uint64_t target = sorted[first] >> 32;
  if (target == 0xffffffffu || (first > 0 && sorted[first - 1] >> 32 == target)) return -1;
  return static_cast<int64_t>(target);
}

// each(row) for every row of the run, in ascending order.
template <class Each>
__device__ __forceinline__ void over_run(const uint64_t* sorted, int64_t first, int in_use,
                                         int64_t target, Each each) {
#pragma unroll 4
  for (int64_t i = first; i < in_use; ++i) {
    const uint64_t key = sorted[i];
    if (static_cast<int64_t>(key >> 32) != target) break;
    each(static_cast<uint32_t>(key));
  }
}

}  // namespace talea::lce
