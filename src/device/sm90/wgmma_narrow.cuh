// What: the warpgroup matrix instruction m64n16k16, and how its narrow operand lies.
// Why: apart from the wide ones: few kernels multiply sixteen columns.
// Never: chooses a width: the kernel's shape does.
#pragma once
#include "device/sm90/wgmma.cuh"

namespace talea::sm90 {

// MN-major, 16 columns: rows (k) of 32 bytes, swizzled by 32, groups of eight k 256 bytes apart.
__device__ __forceinline__ uint64_t narrow_descriptor(const void* shared) {
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  constexpr uint64_t kStride = 256 >> 4, kSwizzle32 = 3;
  return ((address & 0x3ffff) >> 4) | (kStride << 16) | (kStride << 32) | (kSwizzle32 << 62);
}

// clang-format off
// d += a b, a in shared memory or in its four registers, b MN-major.
#define TALEA_WGMMA_N16(TYPE, A, ...) asm volatile( \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7}, " A \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]) \
      : __VA_ARGS__)
template <bool kF16>
__device__ __forceinline__ void multiply_narrow(float (&d)[8], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N16("f16", "%8, %9, 1, 1, 1, 0, 1;", "l"(a), "l"(b));
  else TALEA_WGMMA_N16("bf16", "%8, %9, 1, 1, 1, 0, 1;", "l"(a), "l"(b));
}
template <bool kF16>
__device__ __forceinline__ void multiply_narrow(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N16("f16", "{%8, %9, %10, %11}, %12, 1, 1, 1, 1;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else TALEA_WGMMA_N16("bf16", "{%8, %9, %10, %11}, %12, 1, 1, 1, 1;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Of two operands that operand_descriptor() describes; TA = 1: a is MN-major. d = a b, or d += a b.
template <int TA, bool kF16>
__device__ __forceinline__ void wgmma_first_n16(float (&d)[8], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N16("f16", "%8, %9, 0, 1, 1, %10, 0;", "l"(a), "l"(b), "n"(TA));
  else TALEA_WGMMA_N16("bf16", "%8, %9, 0, 1, 1, %10, 0;", "l"(a), "l"(b), "n"(TA));
}
template <int TA, bool kF16>
__device__ __forceinline__ void wgmma_add_n16(float (&d)[8], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N16("f16", "%8, %9, 1, 1, 1, %10, 0;", "l"(a), "l"(b), "n"(TA));
  else TALEA_WGMMA_N16("bf16", "%8, %9, 1, 1, 1, %10, 0;", "l"(a), "l"(b), "n"(TA));
}
#undef TALEA_WGMMA_N16
// clang-format on

}  // namespace talea::sm90
