// What: a caller's tensor as a kernel reads or writes it, any dtype and stride.
// Why: per-token vectors come in two or three dtypes and any stride; kernels of a pass stay few.
// Never: used for the matrices inside a hot loop.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "talea/tensor.hpp"

namespace talea::device {

struct View {
  void* data = nullptr;
  int64_t stride0 = 0, stride1 = 0;
  DType dtype = DType::f32;

  View() = default;
  explicit View(const Tensor& t)
      : data(t.present ? t.data : nullptr),
        stride0(t.rank > 0 ? t.stride[0] : 0),
        stride1(t.rank > 1 ? t.stride[1] : 0),
        dtype(t.dtype) {}

#ifdef __CUDACC__
  __device__ explicit operator bool() const { return data != nullptr; }

  __device__ double load(int64_t i, int64_t j = 0) const {
    const int64_t at = i * stride0 + j * stride1;
    switch (dtype) {
      case DType::f64:
        return static_cast<const double*>(data)[at];
      case DType::bf16:
        return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
      case DType::f16:
        return __half2float(static_cast<const __half*>(data)[at]);
      default:
        return static_cast<const float*>(data)[at];
    }
  }

  __device__ int64_t load_index(int64_t i, int64_t j = 0) const {
    const int64_t at = i * stride0 + j * stride1;
    return dtype == DType::i32 ? static_cast<const int32_t*>(data)[at]
                               : static_cast<const int64_t*>(data)[at];
  }

  // A double goes to 16 bits through fp32: the values that come here are fp32 or outputs in fp32.
  __device__ void store(int64_t i, int64_t j, double value) const {
    const int64_t at = i * stride0 + j * stride1;
    switch (dtype) {
      case DType::f64:
        static_cast<double*>(data)[at] = value;
        break;
      case DType::bf16:
        static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16(static_cast<float>(value));
        break;
      case DType::f16:
        static_cast<__half*>(data)[at] = __float2half(static_cast<float>(value));
        break;
      case DType::i64:
        static_cast<int64_t*>(data)[at] = static_cast<int64_t>(value);
        break;
      case DType::i32:
        static_cast<int32_t*>(data)[at] = static_cast<int32_t>(value);
        break;
      default:
        static_cast<float*>(data)[at] = static_cast<float>(value);
    }
  }
  __device__ void store(int64_t i, double value) const { store(i, 0, value); }
#endif
};

}  // namespace talea::device
