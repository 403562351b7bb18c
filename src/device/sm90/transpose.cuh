// What: a matrix of 8 x 8 elements of 16 bits in the registers of a warp, transposed.
// Why: a product whose rows are columns of the result leaves a row's elements in several lanes.
// Never: rounds.
#pragma once
#include "device/sm90/ptx.cuh"

namespace talea::sm90 {

// Lane l holds columns 2 (l % 4) and the next of row l / 4, before and after.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace talea::sm90
