// What: pairs of 16-bit values in a word, to fp32 and back.
// Why: rows of both dtypes are read and written a pair at a time.
// Never: knows what the values are.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace talea::lce {

// Two neighbouring 16-bit values; kF16: fp16, otherwise bf16.
template <bool kF16>
__device__ __forceinline__ float2 unpack(uint32_t both) {
  if constexpr (kF16) return __half22float2(*reinterpret_cast<const __half2*>(&both));
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&both));
}

template <bool kF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (kF16) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <bool kF16>
__device__ __forceinline__ float2 load_pair(const void* data, int64_t element) {
  return unpack<kF16>(
      *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(data) + element));
}

}  // namespace talea::lce
