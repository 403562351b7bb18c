// What: the warpgroup matrix instruction m64 x n x k16, fp32 accumulators, for the tile widths in
// use.
// Why: the accumulator registers must be spelled out, and the text is regular.
// Never: chooses a width: the kernel's shape does.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace talea::sm90 {

// Start address and strides of an operand in shared memory, 128-byte swizzle.
// K-major: rows of 64 elements (128 bytes), groups of eight rows 1024 bytes apart.
// MN-major: blocks of 64 (m or n) x 64 (k), 8192 bytes each, groups of eight k 1024 bytes apart.
__device__ __forceinline__ uint64_t operand_descriptor(const void* shared) {
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  constexpr uint64_t kLeading = 8192 >> 4, kStride = 1024 >> 4, kSwizzle128 = 1;
  return ((address & 0x3ffff) >> 4) | (kLeading << 16) | (kStride << 32) | (kSwizzle128 << 62);
}

// clang-format off
// d += a * b; TA / TB = 1: that operand is MN-major. What follows d in the text, by the number of its
// first operand: a in shared memory, or its four registers.
#define TALEA_WGMMA_SHARED(A, B, C, D) "%" #A ", %" #B ", 1, 1, 1, %" #C ", %" #D ";"
#define TALEA_WGMMA_SHARED_INPUTS "l"(a), "l"(b), "n"(TA), "n"(TB)
#define TALEA_WGMMA_FIRST(A, B, C, D) "%" #A ", %" #B ", 0, 1, 1, %" #C ", %" #D ";"
#define TALEA_WGMMA_REGISTERS(A, B, C, D, E, F) \
      "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", 1, 1, 1, %" #F ";"
#define TALEA_WGMMA_REGISTERS_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TB)

#define TALEA_WGMMA_N64(TYPE, REST, INPUTS) asm volatile( \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      REST \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
        "+f"(d[30]), "+f"(d[31]) \
      : INPUTS)
template <int TA, int TB, bool kF16>
__device__ __forceinline__ void wgmma_n64(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N64("f16", TALEA_WGMMA_SHARED(32, 33, 34, 35), TALEA_WGMMA_SHARED_INPUTS);
  else TALEA_WGMMA_N64("bf16", TALEA_WGMMA_SHARED(32, 33, 34, 35), TALEA_WGMMA_SHARED_INPUTS);
}
// d = a * b, whatever d held: the compiler knows that nothing of it is read.
template <int TA, int TB, bool kF16>
__device__ __forceinline__ void wgmma_first_n64(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N64("f16", TALEA_WGMMA_FIRST(32, 33, 34, 35), TALEA_WGMMA_SHARED_INPUTS);
  else TALEA_WGMMA_N64("bf16", TALEA_WGMMA_FIRST(32, 33, 34, 35), TALEA_WGMMA_SHARED_INPUTS);
}
template <int TB, bool kF16>
__device__ __forceinline__ void wgmma_n64(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N64("f16", TALEA_WGMMA_REGISTERS(32, 33, 34, 35, 36, 37), TALEA_WGMMA_REGISTERS_INPUTS);
  else TALEA_WGMMA_N64("bf16", TALEA_WGMMA_REGISTERS(32, 33, 34, 35, 36, 37), TALEA_WGMMA_REGISTERS_INPUTS);
}
#undef TALEA_WGMMA_N64

#define TALEA_WGMMA_N128(TYPE, REST, INPUTS) asm volatile( \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      REST \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
      : INPUTS)
template <int TA, int TB, bool kF16>
__device__ __forceinline__ void wgmma_n128(float (&d)[64], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N128("f16", TALEA_WGMMA_SHARED(64, 65, 66, 67), TALEA_WGMMA_SHARED_INPUTS);
  else TALEA_WGMMA_N128("bf16", TALEA_WGMMA_SHARED(64, 65, 66, 67), TALEA_WGMMA_SHARED_INPUTS);
}
template <int TB, bool kF16>
__device__ __forceinline__ void wgmma_n128(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N128("f16", TALEA_WGMMA_REGISTERS(64, 65, 66, 67, 68, 69), TALEA_WGMMA_REGISTERS_INPUTS);
  else TALEA_WGMMA_N128("bf16", TALEA_WGMMA_REGISTERS(64, 65, 66, 67, 68, 69), TALEA_WGMMA_REGISTERS_INPUTS);
}
#undef TALEA_WGMMA_N128

#define TALEA_WGMMA_N192(TYPE, REST, INPUTS) asm volatile( \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, " \
      REST \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), \
        "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), \
        "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), \
        "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]) \
      : INPUTS)
template <int TA, int TB, bool kF16>
__device__ __forceinline__ void wgmma_n192(float (&d)[96], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N192("f16", TALEA_WGMMA_SHARED(96, 97, 98, 99), TALEA_WGMMA_SHARED_INPUTS);
  else TALEA_WGMMA_N192("bf16", TALEA_WGMMA_SHARED(96, 97, 98, 99), TALEA_WGMMA_SHARED_INPUTS);
}
#undef TALEA_WGMMA_N192

#define TALEA_WGMMA_N256(TYPE, REST, INPUTS) asm volatile( \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
      REST \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), \
        "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), \
        "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), \
        "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), \
        "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), \
        "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), \
        "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), \
        "+f"(d[126]), "+f"(d[127]) \
      : INPUTS)
template <int TA, int TB, bool kF16>
__device__ __forceinline__ void wgmma_n256(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N256("f16", TALEA_WGMMA_SHARED(128, 129, 130, 131), TALEA_WGMMA_SHARED_INPUTS);
  else TALEA_WGMMA_N256("bf16", TALEA_WGMMA_SHARED(128, 129, 130, 131), TALEA_WGMMA_SHARED_INPUTS);
}
template <int TA, int TB, bool kF16>
__device__ __forceinline__ void wgmma_first_n256(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N256("f16", TALEA_WGMMA_FIRST(128, 129, 130, 131), TALEA_WGMMA_SHARED_INPUTS);
  else TALEA_WGMMA_N256("bf16", TALEA_WGMMA_FIRST(128, 129, 130, 131), TALEA_WGMMA_SHARED_INPUTS);
}
template <int TB, bool kF16>
__device__ __forceinline__ void wgmma_n256(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kF16) TALEA_WGMMA_N256("f16", TALEA_WGMMA_REGISTERS(128, 129, 130, 131, 132, 133), TALEA_WGMMA_REGISTERS_INPUTS);
  else TALEA_WGMMA_N256("bf16", TALEA_WGMMA_REGISTERS(128, 129, 130, 131, 132, 133), TALEA_WGMMA_REGISTERS_INPUTS);
}
#undef TALEA_WGMMA_N256

// clang-format on
#undef TALEA_WGMMA_SHARED
#undef TALEA_WGMMA_SHARED_INPUTS
#undef TALEA_WGMMA_FIRST
#undef TALEA_WGMMA_REGISTERS
#undef TALEA_WGMMA_REGISTERS_INPUTS

template <int kN, int TA, int TB, bool kF16>
__device__ __forceinline__ void multiply_tile(float (&d)[kN / 2], uint64_t a, uint64_t b) {
  if constexpr (kN == 64) wgmma_n64<TA, TB, kF16>(d, a, b);
  if constexpr (kN == 128) wgmma_n128<TA, TB, kF16>(d, a, b);
  if constexpr (kN == 192) wgmma_n192<TA, TB, kF16>(d, a, b);
  if constexpr (kN == 256) wgmma_n256<TA, TB, kF16>(d, a, b);
}

// Keeps the compiler from moving reads and writes of accumulators across a wait or an arrive, which
// do not name them.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// a: rows of 16 columns in registers, as the accumulators of an earlier product lie.
template <int kN, int TB, bool kF16>
__device__ __forceinline__ void multiply_registers(float (&d)[kN / 2], const uint32_t (&a)[4],
                                                   uint64_t b) {
  if constexpr (kN == 64) wgmma_n64<TB, kF16>(d, a, b);
  if constexpr (kN == 128) wgmma_n128<TB, kF16>(d, a, b);
  if constexpr (kN == 256) wgmma_n256<TB, kF16>(d, a, b);
}

}  // namespace talea::sm90
