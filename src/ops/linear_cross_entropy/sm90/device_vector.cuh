// Reads and writes the caller's per-token tensors of any dtype and stride on the device.
// Exists so that kernels see doubles and indices, not dtypes.
// Never vectorises: these tensors are small.
#pragma once
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

}  // namespace talea::lce
