// Reads and writes the caller's per-token tensors of any dtype and stride on the device, and pairs
// of 16-bit values. Exists so that kernels see doubles and indices, not dtypes. Never vectorises
// the per-token tensors: they are small.
#pragma once
#include <cuda_fp16.h>

#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"

namespace talea::lce {

__device__ __forceinline__ double read(const DeviceVector& v, int64_t i, double absent) {
  if (!v.data) return absent;
  const int64_t at = i * v.stride;
  switch (v.dtype) {
    case DType::f32:
      return static_cast<const float*>(v.data)[at];
    case DType::f64:
      return static_cast<const double*>(v.data)[at];
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(v.data)[at]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(v.data)[at]);
    case DType::i32:
      return static_cast<const int32_t*>(v.data)[at];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(v.data)[at]);
    case DType::f8_e4m3:  // refused by the contract
    case DType::u8:
      break;
  }
  return absent;
}

__device__ __forceinline__ int64_t read_index(const DeviceVector& v, int64_t i) {
  const int64_t at = i * v.stride;
  return v.dtype == DType::i64 ? static_cast<const int64_t*>(v.data)[at]
                               : static_cast<const int32_t*>(v.data)[at];
}

__device__ __forceinline__ void write(const DeviceVector& v, int64_t i, double x) {
  if (!v.data) return;
  const int64_t at = i * v.stride;
  if (v.dtype == DType::f64)
    static_cast<double*>(v.data)[at] = x;
  else
    static_cast<float*>(v.data)[at] = static_cast<float>(x);
}

__device__ __forceinline__ void write_index(const DeviceVector& v, int64_t i, int64_t x) {
  if (v.data) static_cast<int64_t*>(v.data)[i * v.stride] = x;
}

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
