// The per-row buffers and the logit rule that the kernels of the CUDA lanes share.
// Exists so that products, finish and scatter agree on layout, units and sentinels.
// Never owns memory: every pointer lies in the caller's workspace or tensors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace talea::lce {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// bf16 has the exponent range of fp32: exp(z - shift) stays exact enough while the row's maximum is
// no more than 60 nats above the shift. It is never below: the shift is a maximum of the row's own.
inline constexpr float kReach2 = 60 * kLog2E;

// A row maximum as an integer of the same order; the least one means: within reach of the shift.
inline constexpr int kNoPeak = INT32_MIN;
#ifdef __CUDACC__
__device__ __forceinline__ int encode_peak(float x) {
  const int bits = __float_as_int(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float decode_peak(int code) {
  return __int_as_float(code ^ ((code >> 31) & 0x7fffffff));
}
__device__ __forceinline__ bool needs_repair(int code) { return code != kNoPeak; }
#endif

// Compacted rows: entry i describes the i-th row that is neither ignored nor poisoned.
struct RowBuffers {
  int* index = nullptr;            // row of X, dX and of every per-token tensor
  int* target = nullptr;           // local vocabulary id; -1: not on this rank
  float* scale = nullptr;          // per-token logit scale, where given
  float* shift = nullptr;          // log2 units
  int* peak = nullptr;             // encode_peak of a maximum out of reach, else kNoPeak
  float* target_logit = nullptr;   // z of the target, natural units
  float* factor = nullptr;         // f_t: dX = f E W, dW += E^T (f X)
  float* target_factor = nullptr;  // the target's own coefficient, kept out of E

  __host__ __device__ RowBuffers from(int64_t row) const {
    return {index + row,  target + row,       scale ? scale + row : nullptr,
            shift + row,  peak + row,         target_logit + row,
            factor + row, target_factor + row};
  }
};

// From the fp32 accumulator to the logit, in log2 units.
struct LogitRule {
  float scale = 1;
  float softcap = 0;  // 0: none
  const void* bias = nullptr;
  bool bias_is_bf16 = false;
  float inverse_softcap = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ float bias_at(int column) const {
    if (!bias) return 0.f;
    return bias_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[column])
                        : static_cast<const float*>(bias)[column];
  }
  // tanh by exp keeps fp32 accuracy where the hardware's tanh has eleven bits.
  __device__ __forceinline__ float capped2(float a) const {
    float e, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a * (2 * kLog2E * inverse_softcap)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.f));
    return fmaf(inverse, -2 * kLog2E * softcap, kLog2E * softcap);
  }
  __device__ __forceinline__ float log2_logit(float a) const {
    return softcap > 0 ? capped2(a) : a * kLog2E;
  }
  // d z / d a at a logit given in log2 units.
  __device__ __forceinline__ float slope2(float x) const {
    const float t = x * kLn2 * inverse_softcap;
    return 1.f - t * t;
  }
#endif
};

}  // namespace talea::lce
