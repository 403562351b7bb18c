// What: the per-row buffers and the logit rule that the kernels of lane sm90 share.
// Why: products, finish and scatter agree on layout, units and sentinels.
// Never: owns memory: every pointer lies in the caller's workspace or tensors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/mutant.hpp"

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
  int* target = nullptr;           // local vocabulary id; -1: not on this rank, or none
  float* scale = nullptr;          // per-token logit scale, where given
  float* shift = nullptr;          // log2 units
  int* peak = nullptr;             // encode_peak of a maximum out of reach, else kNoPeak
  float* target_logit = nullptr;   // z of the target, natural units
  float* factor = nullptr;         // f_t: dX = f B W, dW += B^T (f X), B: what the buffer holds
  float* target_factor = nullptr;  // the target's own coefficient, kept out of B

  __host__ __device__ RowBuffers from(int64_t row) const {
    return {index + row,  target + row,       scale ? scale + row : nullptr,
            shift + row,  peak + row,         target_logit + row,
            factor + row, target_factor + row};
  }
};

// What the gradient of one logit needs of its row: with x = z - base and e = exp(x),
// p = e inverse, and log p + entropy = x + offset.
struct RowFactors {
  float base, inverse, offset;
  float prob, smooth, soft, entropy_up;
  float scale;   // of the stored element: logit scale, and for fp16 a power of two
  int exponent;  // that power: the buffer holds s da 2^exponent
};

// The rows of one chunk: [begin, begin + rows) of those in use, whose number is on the device.
struct RowRange {
  const int* in_use = nullptr;
  int64_t begin = 0, rows = 0;
#ifdef __CUDACC__
  __device__ __forceinline__ int64_t count() const {
    const int64_t left = *in_use - begin;
    return left < 0 ? 0 : left < rows ? left : rows;
  }
#endif
};

// Where the sums of (tile, row) lie: [tiles, stride], from a pointer on. In dX, of whose last rows
// no chunk before has written as many as this one has in use, they lie densely and end at the
// pointer: tiles count from -tiles, and the stride, 0 here, is the number of those rows.
struct TilePlaces {
  int64_t stride = 0;
  int first = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t at(int tile, int row, int rows) const {
    return (first + tile) * (stride > 0 ? stride : int64_t{rows}) + row;
  }
#endif
};

// Where the gradient products of the chunks so far count the tiles whose part of the buffer they
// have read: dX all of them, dW those of every kWords words. At the counts given here the chunk
// before is done with them.
struct Readers {
  static constexpr int kWords = 192;  // dW's tiles are as high; they come in pairs
  static int64_t counters(int64_t vocab) { return 1 + (vocab + 2 * kWords - 1) / kWords; }
  int *dx = nullptr, *dw = nullptr;
  int dx_least = 0, dw_least = 0;
};

// From the fp32 accumulator to the logit.
struct LogitRule {
  float scale = 1;
  float softcap = 0;            // 0: none
  const float* bias = nullptr;  // fp32, local columns
  float inverse_softcap = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ float bias_at(int column) const { return bias ? bias[column] : 0.f; }
  // In log2 units, of a times capped_input(). tanh by exp keeps fp32 accuracy where the hardware's
  // tanh has eleven bits.
  __device__ __forceinline__ float capped_input() const { return 2 * kLog2E * inverse_softcap; }
  __device__ __forceinline__ float capped_unit(float a) const {
    float e, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.f));
    return fmaf(inverse, -2 * kLog2E * softcap, kLog2E * softcap);
  }
  __device__ __forceinline__ float capped2(float a) const {
    return capped_unit(a * capped_input());
  }
  __device__ __forceinline__ float log2_logit(float a) const {
    return softcap > 0 ? capped2(a) : a * kLog2E;
  }
  // d z / d a at a logit given in log2 units.
  __device__ __forceinline__ float slope2(float x) const {
    const float t = x * kLn2 * inverse_softcap;
    return mutant(Mutant::softcap_no_derivative) ? 1.f : 1.f - t * t;
  }
  // z and d z / d a in natural units, for passes that read fp32 logits.
  __device__ __forceinline__ float capped(float a, float& slope) const {
    slope = 1.f;
    if (!(softcap > 0)) return a;
    // Near the cap 1 - tanh^2 would leave no digits; a saturated logit has no gradient.
    const float e = expf(-2.f * fabsf(a) * inverse_softcap), r = 1.f / (1.f + e);
    slope = e < 0x1p-62f ? 0.f : 4.f * e * r * r;
    if (mutant(Mutant::softcap_no_derivative)) slope = 1.f;
    return softcap * tanhf(a * inverse_softcap);
  }
#endif
};

}  // namespace talea::lce
