// What: the epilogue of the logits product: exp(z - shift) in bf16 and the partial sums of every
// row.
// Why: the softmax sees the fp32 accumulator and logits never reach memory.
// Never: lets the target's own term into the sum or into the 16-bit buffer.
//
//   product: a [rows, vocab] = X [rows, hidden] W^T;   tile: 128 rows, 192 words, one block
//   a warp, 16 rows of it at a time; z in log2 units:
//     target_logit[row] = z[row, target], where the tile holds it; a there and past the end = -inf
//     for each 64 columns:
//       z = scale a + bias, capped;  e = exp2(z - shift[row])
//       sum += e;  shifted += e (z - shift);  classes += c z;  peak = max(peak, z - shift)
//       buffer [rows, vocab] = e in bf16, by TMA                            store, ahead
//     tile_sums (.. shifted, classes, peaks) [tile, row] = those            not shift
//     peak[row] = z's maximum, where it is out of reach of the shift: repaired by a second launch
#pragma once
#include "ops/linear_cross_entropy/sm90/logits_tile.cuh"
#include "ops/linear_cross_entropy/sm90/products.hpp"

namespace talea::lce::sm90 {

struct LogitsParams {
  CUtensorMap exp_map;            // [rows, vocab] bf16
  RowBuffers rows;                // at the chunk's first row
  float* tile_sums = nullptr;     // [tiles, row]: sum over v != target of exp(z - shift)
  float* tile_shifted = nullptr;  // the same of exp(x) x, log2 units, or null (general only)
  float* tile_classes =
      nullptr;                  // sum over v != target of c_v z_v, log2 units, or null (full only)
  float* tile_peaks = nullptr;  // maximum over v != target: of z - shift, or null (full only);
                                // online: of z, what the tile's sums are relative to
  const float* class_weight = nullptr;  // local, or null for ones
  TilePlaces places;
  int vocab = 0;
  int pair_rows = 256;  // rows of the two tiles that a pair of blocks takes
  LogitRule rule;
  bool repair = false;  // second launch: only row tiles whose shift turned out too far off
  Readers readers;      // ahead only
};

// Row tiles without a row to repair are skipped in the second launch.
struct RepairFilter {
  const uint32_t* bits;
  bool all, some = false;

  __device__ RepairFilter(const LogitsParams& p, int rows, uint32_t* words)
      : bits(words), all(!p.repair) {
    if (all) return;
    if (threadIdx.x < 16) words[threadIdx.x] = 0;
    __syncthreads();
    for (int row = threadIdx.x; row < rows; row += blockDim.x)
      if (needs_repair(p.rows.peak[row]))
        atomicOr(&words[row / p.pair_rows / 32 % 16], 1u << (row / p.pair_rows % 32));
    __syncthreads();
    for (int i = 0; i < 16; ++i) some = some || words[i] != 0;
  }
  __device__ bool none() const { return !all && !some; }
  __device__ bool skips(int pair) const {
    return !all && !(bits[pair / 32 % 16] >> (pair % 32) & 1);
  }
};

// kGeneral: bias, softcap, per-token scale, entropy. kFull: beside them, sums and maxima per tile
// for smoothing under a softcap and for the best words.
template <LogitsMode kMode, bool kGeneral, bool kFull>
struct LogitsEpilogue : LogitsTile, ReadsNothing {
  using Params = LogitsParams;
  using Filter = RepairFilter;

  // Beside the gradient products of the chunk before, it waits for those tile by tile.
  static __device__ __forceinline__ void before(const Params&) {
    if constexpr (kMode == LogitsMode::ahead)
      let_later_kernels_start();
    else
      begin_after_earlier_kernels();
    if (mutant(KernelMutant::wait_left_out) && blockIdx.x == 0)
      for (int i = 0; i < 4; ++i) __nanosleep(500000);  // without it the product may be first
  }
  static __device__ __forceinline__ void ready(const Params&) {}
  static __device__ __forceinline__ void after(const Params&) { wait_for_earlier_kernels(); }

  static constexpr float kLeast = -3e38f;
  static constexpr bool kStores = kMode == LogitsMode::store || kMode == LogitsMode::ahead;

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
    constexpr bool kKnown = kStores || kMode == LogitsMode::sums;
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

  // One logit: its term of the sum, and what the buffer holds for it. scale and bias are in the
  // units of `unit`. A full epilogue leaves exp(z - shift): what needs its sums forms da in a pass
  // of its own.
  template <bool kCapped, bool kMasked>
  static __device__ __forceinline__ float term(const Params& p, Row& r, float scale, float acc,
                                               float bias, float weight) {
    if constexpr (!kGeneral) {
      const float x = fmaf(acc, scale, -r.shift), e = exp2_fast(x);
      r.peak = fmaxf(r.peak, x);
      r.sum += e;
      return e;
    }
    const float a = fmaf(acc, scale, bias);
    float z2 = kCapped ? p.rule.capped_unit(a) : a, x = z2 - r.shift;
    // -inf marks the target and the columns past the end: it must stay -inf under any sign.
    if (kMasked && acc == -INFINITY) z2 = 0.f, x = -INFINITY;
    if (kFull) r.classes = fmaf(weight, z2, r.classes);
    r.peak = fmaxf(r.peak, x);
    const float e = exp2_fast(x);
    r.sum += e;
    // 0 times -inf would not be a number; under a cap only what is masked is that small.
    r.shifted = fmaf(e, kCapped && !kMasked ? x : fmaxf(x, kLeast), r.shifted);
    return kCapped && !kFull ? e * p.rule.slope2(z2) : e;
  }

  template <bool kCapped, bool kMasked>
  static __device__ __forceinline__ void terms(const float* acc, const Params& p, Row& upper,
                                               Row& lower, const float* bias, const float* weight,
                                               uint32_t* packed) {
    const float unit = !kGeneral ? 1.f : kCapped ? p.rule.capped_input() : kLog2E;
    const float up = upper.scale * unit, low = lower.scale * unit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* a = acc + 4 * j;
      const float b0 = bias[2 * j] * unit, b1 = bias[2 * j + 1] * unit;
      const float w0 = kFull ? weight[2 * j] : 1.f, w1 = kFull ? weight[2 * j + 1] : 1.f;
      const float u0 = term<kCapped, kMasked>(p, upper, up, a[0], b0, w0);
      const float u1 = term<kCapped, kMasked>(p, upper, up, a[1], b1, w1);
      const float l0 = term<kCapped, kMasked>(p, lower, low, a[2], b0, w0);
      const float l1 = term<kCapped, kMasked>(p, lower, low, a[3], b1, w1);
      packed[2 * j] = pack(u0, u1);
      packed[2 * j + 1] = pack(l0, l1);
    }
  }

  // The choice of rule is made once per 32 columns, so that their arithmetic overlaps.
  template <bool kMasked>
  static __device__ __forceinline__ void columns(const float* acc, const Params& p, Row& upper,
                                                 Row& lower, int column, uint32_t* packed) {
    float bias[8] = {}, weight[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (kGeneral && p.rule.bias) read<kMasked>(p.rule.bias, p.vocab, column, bias);
    if (kFull && p.class_weight) read<kMasked>(p.class_weight, p.vocab, column, weight);
    if (kGeneral && p.rule.softcap > 0)
      terms<true, kMasked>(acc, p, upper, lower, bias, weight, packed);
    else
      terms<false, kMasked>(acc, p, upper, lower, bias, weight, packed);
  }

  // 64 columns of the warp's 16 rows, through shared memory to TMA.
  template <class S, bool kMasked>
  static __device__ __forceinline__ void group(const float (&acc)[S::kBlockN / 2], const Params& p,
                                               Row& upper, Row& lower, int g, int row, int column,
                                               char* staging) {
    const int first = column + 64 * g + 2 * static_cast<int>(threadIdx.x % 4);
    uint32_t packed[16];
    columns<kMasked>(&acc[32 * g], p, upper, lower, first, packed);
    columns<kMasked>(&acc[32 * g + 16], p, upper, lower, first + 32, packed + 8);
    if constexpr (!kStores) return;
    store_piece(p.exp_map, packed, staging, column + 64 * g, row);
  }

  // Few tiles hold a target or the end of the vocabulary: the others need not look for them.
  template <class S, bool kMasked>
  static __device__ __forceinline__ void groups(const float (&acc)[S::kBlockN / 2], const Params& p,
                                                Row& upper, Row& lower, int row, int column,
                                                char* staging) {
#pragma unroll
    for (int g = 0; g < S::kBlockN / 64; ++g)
      group<S, kMasked>(acc, p, upper, lower, g, row, column, staging);
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
      const int64_t at = p.places.at(tile, row, rows);
      p.tile_sums[at] = r.sum;
      if (kGeneral && p.tile_shifted) p.tile_shifted[at] = r.shifted;
      if (kFull && p.tile_classes) p.tile_classes[at] = r.classes;
      if (kMode == LogitsMode::online) {
        p.tile_peaks[at] = r.shift;
        return;
      }
      if (kFull && p.tile_peaks) p.tile_peaks[at] = r.peak;
      if (!p.repair && r.peak > kReach2)
        atomicMax(&p.rows.peak[row], encode_peak(r.peak + r.shift));
    }
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
    const int lane = threadIdx.x % 32;
    if constexpr (kMode == LogitsMode::ahead) {
      static_assert(S::kBlockN == Readers::kWords, "one count a tile");
      if (lane == 0) {
        wait_for_count(p.readers.dx, p.readers.dx_least);
        if (!mutant(KernelMutant::ahead_wait_left_out))
          wait_for_count(p.readers.dw + column / Readers::kWords, p.readers.dw_least);
      }
      __syncwarp();
    }
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = first_row + 64 * part, own = row + lane / 4;
      Row upper = begin<S>(p, own, work.rows, column);
      Row lower = begin<S>(p, own + 8, work.rows, column);
      const bool u = static_cast<unsigned>(upper.target) < S::kBlockN;
      const bool l = static_cast<unsigned>(lower.target) < S::kBlockN;
      const bool here = __any_sync(0xffffffffu, u || l);
      const bool masked = here || column + S::kBlockN > p.vocab;
      if (here) {
        if (u) take_target<S>(acc[part], p, upper, 0, own, column);
        if (l) take_target<S>(acc[part], p, lower, 1, own + 8, column);
      }
      if (column + S::kBlockN > p.vocab) mask_columns<S>(acc[part], p.vocab - column);
      if constexpr (kMode == LogitsMode::online) {
        find_shift<S>(acc[part], p, upper, 0, column);
        find_shift<S>(acc[part], p, lower, 1, column);
      }
      if (kGeneral && masked)
        groups<S, true>(acc[part], p, upper, lower, row, column, staging);
      else
        groups<S, false>(acc[part], p, upper, lower, row, column, staging);
      finish(p, upper, own, work.rows, column / S::kBlockN);
      finish(p, lower, own + 8, work.rows, column / S::kBlockN);
    }
  }
};

}  // namespace talea::lce::sm90
