// The epilogue of the logits product: exp(z - shift) in bf16 and the partial sums of every row.
// Exists so that the softmax sees the fp32 accumulator and logits never reach memory.
// Never lets the target's own term into the sum or into the 16-bit buffer.
#pragma once
#include "device/sm90/gemm.cuh"
#include "ops/linear_cross_entropy/sm90/rows.hpp"

namespace talea::lce::sm90 {

using namespace talea::sm90;

enum class LogitsMode {
  shift,  // only the row maximum of the first vocabulary tile, which becomes the row's shift
  store,  // partial sums, and exp(z - shift) into the buffer
  sums,   // partial sums alone: nothing of the size of the logits is written
  online  // the same relative to each tile's own maximum: no shift has to be known
};

struct LogitsParams {
  CUtensorMap exp_map;         // [rows, vocab] bf16
  RowBuffers rows;             // at the chunk's first row
  float* tile_sums = nullptr;  // [tiles][tile_sums_stride]: sum over v != target of exp(z - shift)
  float* tile_shifted = nullptr;  // the same of exp(x) x, log2 units, or null (general only)
  float* tile_classes =
      nullptr;                  // sum over v != target of c_v z_v, log2 units, or null (full only)
  float* tile_peaks = nullptr;  // maximum over v != target: of z - shift, or null (full only);
                                // online: of z, what the tile's sums are relative to
  const float* class_weight = nullptr;  // local, or null for ones
  bool plain = false;  // the buffer gets exp(z - shift) without the softcap's slope
  int64_t tile_sums_stride = 0;
  int vocab = 0;
  int pair_rows = 256;  // rows of the two tiles that a pair of blocks takes
  LogitRule rule;
  bool repair = false;  // second launch: only row tiles whose shift turned out too far off
};

// Row tiles without a row to repair are skipped in the second launch.
struct RepairFilter {
  const uint32_t* bits;
  bool all;

  __device__ RepairFilter(const LogitsParams& p, int rows, void* shared)
      : bits(static_cast<const uint32_t*>(shared)), all(!p.repair) {
    if (all) return;
    auto* words = static_cast<uint32_t*>(shared);
    if (threadIdx.x < 16) words[threadIdx.x] = 0;
    __syncthreads();
    for (int row = threadIdx.x; row < rows; row += blockDim.x)
      if (needs_repair(p.rows.peak[row]))
        atomicOr(&words[row / p.pair_rows / 32 % 16], 1u << (row / p.pair_rows % 32));
    __syncthreads();
  }
  __device__ bool skips(int pair) const {
    return !all && !(bits[pair / 32 % 16] >> (pair % 32) & 1);
  }
};

// kGeneral: bias, softcap, per-token scale, entropy. kFull: beside them, sums and maxima per tile
// for smoothing under a softcap and for the best words.
template <LogitsMode kMode, bool kGeneral, bool kFull>
struct LogitsEpilogue {
  using Params = LogitsParams;
  using Filter = RepairFilter;
  static __device__ void before(const Params&) { wait_for_earlier_kernels(); }
  static __device__ void after(const Params&) {}

  // The accumulators of one row pair become log2-domain values x = (z - shift) log2 e.
  struct Row {
    float shift;  // in log2 units
    float scale;  // logit scale (times log2 e without softcap)
    int target;   // column within the tile, or out of range
    float sum = 0, shifted = 0, classes = 0, peak = -INFINITY;
  };

  static __device__ __forceinline__ float logit2(const LogitRule& r, float acc, float scale,
                                                 float bias) {
    if constexpr (kGeneral) return r.log2_logit(acc * scale + bias);
    return acc * scale;
  }

  template <class S>
  static __device__ __forceinline__ Row begin(const Params& p, int row, int rows, int column) {
    Row r;
    const bool real = row < rows;
    r.shift = INFINITY;  // rows past the end: exp(-inf) = 0
    r.target = -1;
    r.scale = kGeneral ? p.rule.scale : p.rule.scale * kLog2E;
    if (!real) return r;
    constexpr bool kKnown = kMode == LogitsMode::store || kMode == LogitsMode::sums;
    r.shift = kKnown ? p.rows.shift[row] : 0.f;
    if (p.repair && needs_repair(p.rows.peak[row])) r.shift = decode_peak(p.rows.peak[row]);
    r.target = p.rows.target[row] - column;
    if (kGeneral && p.rows.scale) r.scale *= p.rows.scale[row];
    return r;
  }

  // Takes the target's logit out of the tile; the rest of the epilogue sees exp(-inf) = 0 there.
  template <class S>
  static __device__ __forceinline__ void take_target(float (&acc)[S::kBlockN / 2], const Params& p,
                                                     const Row& r, int half, int row, int column) {
    const int own = r.target - 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < S::kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (own == 8 * j + e) {
          float& a = acc[4 * j + 2 * half + e];
          if (kMode != LogitsMode::shift) {
            const float bias = kGeneral ? p.rule.bias_at(column + r.target) : 0.f;
            p.rows.target_logit[row] = logit2(p.rule, a, r.scale, bias) * kLn2;
          }
          a = -INFINITY;
        }
  }

  template <class S>
  static __device__ __forceinline__ void mask_columns(float (&acc)[S::kBlockN / 2], int left) {
    const int first = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < S::kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e + first >= left) acc[4 * j + e] = acc[4 * j + 2 + e] = -INFINITY;
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }

  // One logit: its term of the sum, and what the buffer holds for it.
  template <bool kCapped>
  static __device__ __forceinline__ float term(const Params& p, Row& r, float acc, float bias,
                                               float weight) {
    float x;
    if constexpr (kGeneral) {
      // -inf marks the target and the columns past the end: it must stay -inf under any sign.
      const float a = fmaf(acc, r.scale, bias);
      const float z2 = kCapped ? p.rule.capped2(a) : a * kLog2E;
      x = acc == -INFINITY ? -INFINITY : z2 - r.shift;
      if (kFull) r.classes = fmaf(weight, acc == -INFINITY ? 0.f : z2, r.classes);
    } else {
      x = fmaf(acc, r.scale, -r.shift);
    }
    r.peak = fmaxf(r.peak, x);
    const float e = exp2_fast(x);
    r.sum += e;
    if constexpr (!kGeneral) return e;
    // exp(-inf) stays 0 where its product or its slope would not be a number.
    r.shifted = fmaf(e, e == 0.f ? 0.f : x, r.shifted);
    if (kFull && p.plain) return e;
    if constexpr (kCapped) return e == 0.f ? 0.f : e * p.rule.slope2(x + r.shift);
    return e;
  }

  // The bias of four blocks of eight columns, read ahead of the arithmetic and not between.
  static __device__ __forceinline__ void read_words(const Params& p, const float* words, int column,
                                                    float* values) {
    const int last = p.vocab - 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = words[min(column + 8 * (i / 2) + i % 2, last)];
  }

  template <bool kCapped>
  static __device__ __forceinline__ void terms(const float* acc, const Params& p, Row& upper,
                                               Row& lower, const float* bias, const float* weight,
                                               uint32_t* packed) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* a = acc + 4 * j;
      const float b0 = bias[2 * j], b1 = bias[2 * j + 1];
      const float w0 = kFull ? weight[2 * j] : 1.f, w1 = kFull ? weight[2 * j + 1] : 1.f;
      const float u0 = term<kCapped>(p, upper, a[0], b0, w0);
      const float u1 = term<kCapped>(p, upper, a[1], b1, w1);
      const float l0 = term<kCapped>(p, lower, a[2], b0, w0);
      const float l1 = term<kCapped>(p, lower, a[3], b1, w1);
      packed[2 * j] = pack(u0, u1);
      packed[2 * j + 1] = pack(l0, l1);
    }
  }

  // The choice of rule is made once per 32 columns, so that their arithmetic overlaps.
  static __device__ __forceinline__ void columns(const float* acc, const Params& p, Row& upper,
                                                 Row& lower, int column, uint32_t* packed) {
    float bias[8] = {}, weight[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (kGeneral && p.rule.bias) read_words(p, p.rule.bias, column, bias);
    if (kFull && p.class_weight) read_words(p, p.class_weight, column, weight);
    if (kGeneral && p.rule.softcap > 0)
      terms<true>(acc, p, upper, lower, bias, weight, packed);
    else
      terms<false>(acc, p, upper, lower, bias, weight, packed);
  }

  // 64 columns of the warp's 16 rows, through shared memory to the copy engine.
  template <class S>
  static __device__ __forceinline__ void group(const float (&acc)[S::kBlockN / 2], const Params& p,
                                               Row& upper, Row& lower, int g, int row, int column,
                                               char* staging) {
    const int lane = threadIdx.x % 32, first = column + 64 * g + 2 * (lane % 4);
    uint32_t packed[16];
    columns(&acc[32 * g], p, upper, lower, first, packed);
    columns(&acc[32 * g + 16], p, upper, lower, first + 32, packed + 8);
    if constexpr (kMode != LogitsMode::store) return;
    if (lane == 0) store_wait_read<0>();
    __syncwarp();
    // Lane i names row i % 16 of the 8-column blocks 2 q + i / 16; 16-byte pieces are swizzled.
    const int r = lane % 16;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int piece = (2 * q + lane / 16) ^ (r % 8);
      store_matrix_x4(staging + r * 128 + piece * 16, packed[4 * q], packed[4 * q + 1],
                      packed[4 * q + 2], packed[4 * q + 3]);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      store_tile(&p.exp_map, staging, column + 64 * g, row);
      store_commit();
    }
  }

  // The maximum of a row of the tile becomes its shift.
  template <class S>
  static __device__ __forceinline__ void find_shift(const float (&acc)[S::kBlockN / 2],
                                                    const Params& p, Row& r, int half, int column) {
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < S::kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = acc[4 * j + 2 * half + e];
        const int c = min(column + 8 * j + 2 * static_cast<int>(threadIdx.x % 4) + e, p.vocab - 1);
        const float bias = kGeneral && p.rule.bias ? p.rule.bias[c] : 0.f;
        if (a != -INFINITY) most = fmaxf(most, logit2(p.rule, a, r.scale, bias));
      }
    for (int step = 1; step <= 2; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (r.shift != INFINITY) r.shift = most == -INFINITY ? 0.f : most;
  }

  static __device__ __forceinline__ void finish(const Params& p, Row& r, int row, int rows,
                                                int tile) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      r.sum += __shfl_xor_sync(0xffffffffu, r.sum, step);
      if (kGeneral) r.shifted += __shfl_xor_sync(0xffffffffu, r.shifted, step);
      if (kFull) r.classes += __shfl_xor_sync(0xffffffffu, r.classes, step);
      r.peak = fmaxf(r.peak, __shfl_xor_sync(0xffffffffu, r.peak, step));
    }
    if (threadIdx.x % 4 != 0 || row >= rows) return;
    if constexpr (kMode == LogitsMode::shift) {
      p.rows.shift[row] = fabsf(r.peak) < INFINITY ? r.peak : 0.f;
    } else {
      p.tile_sums[tile * p.tile_sums_stride + row] = r.sum;
      if (kGeneral && p.tile_shifted) p.tile_shifted[tile * p.tile_sums_stride + row] = r.shifted;
      if (kFull && p.tile_classes) p.tile_classes[tile * p.tile_sums_stride + row] = r.classes;
      if (kMode == LogitsMode::online) {
        p.tile_peaks[tile * p.tile_sums_stride + row] = r.shift;
        return;
      }
      if (kFull && p.tile_peaks) p.tile_peaks[tile * p.tile_sums_stride + row] = r.peak;
      if (!p.repair && r.peak > kReach2)
        atomicMax(&p.rows.peak[row], encode_peak(r.peak + r.shift));
    }
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const Schedule<S>& work, int first_row, int column,
                                             char* staging) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = first_row + 64 * part, own = row + lane / 4;
      Row upper = begin<S>(p, own, work.rows, column);
      Row lower = begin<S>(p, own + 8, work.rows, column);
      const bool u = static_cast<unsigned>(upper.target) < S::kBlockN;
      const bool l = static_cast<unsigned>(lower.target) < S::kBlockN;
      if (__any_sync(0xffffffffu, u || l)) {
        if (u) take_target<S>(acc[part], p, upper, 0, own, column);
        if (l) take_target<S>(acc[part], p, lower, 1, own + 8, column);
      }
      if (column + S::kBlockN > p.vocab) mask_columns<S>(acc[part], p.vocab - column);
      if constexpr (kMode == LogitsMode::online) {
        find_shift<S>(acc[part], p, upper, 0, column);
        find_shift<S>(acc[part], p, lower, 1, column);
      }
#pragma unroll
      for (int g = 0; g < S::kBlockN / 64; ++g)
        group<S>(acc[part], p, upper, lower, g, row, column, staging);
      finish(p, upper, own, work.rows, column / S::kBlockN);
      finish(p, lower, own + 8, work.rows, column / S::kBlockN);
    }
  }
};

}  // namespace talea::lce::sm90
