// What: the warpgroup matrix instruction m64n32k16: half of the columns of a swizzled tile.
// Why: products of one half run while the other's leave: sixteen accumulators a thread each.
// Never: chooses a width: the kernel's shape does.
#pragma once
#include "device/sm90/wgmma.cuh"

namespace talea::sm90 {

// clang-format off
// d += a b, or d = a b (adds 0); both in shared memory and MN-major. b's columns 32 to 63 of a tile
// begin 64 bytes behind its first: the swizzle is one of addresses.
#define TALEA_WGMMA_N32(TYPE) asm volatile( \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
      "%16, %17, %18, 1, 1, 1, 1;" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
      : "l"(a), "l"(b), "n"(adds ? 1 : 0))
template <bool adds, bool kF16>
__device__ __forceinline__ void multiply_half(float (&d)[16], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N32("f16");
  else TALEA_WGMMA_N32("bf16");
}
#undef TALEA_WGMMA_N32
// clang-format on

}  // namespace talea::sm90
