// What: matrices of 8 x 8 elements of 16 bits that a warp holds, transposed in registers or on their
// way into shared memory.
// Why: a product whose rows are keys leaves rows where others need columns.
// Never: rounds.
#pragma once
#include "device/sm90/ptx.cuh"

namespace talea::sm90 {

// Each matrix of 8 x 8 is stored transposed: lane l holds columns 2 (l % 4) and the next of row l
// / 4.
__device__ __forceinline__ void store_matrix_x4_transposed(void* to, uint32_t a, uint32_t b,
                                                           uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   smem_address(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// A matrix of 8 x 8 in the registers of a warp, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace talea::sm90
