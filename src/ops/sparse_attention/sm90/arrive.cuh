// What: a warp's arrival at a barrier, by one of its lanes.
// Why: a barrier counts warps where each has read what it frees as a whole.
// Never: waits for another warp.
#pragma once

#include "device/sm90/ptx.cuh"

namespace talea::sparse_attention::sm90 {

namespace ptx = talea::sm90;

__device__ inline void arrive_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

}  // namespace talea::sparse_attention::sm90
