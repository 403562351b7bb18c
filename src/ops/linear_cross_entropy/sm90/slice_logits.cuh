// What: the epilogue of the logits product whose rows are finished: da in 16 bits, straight from
// the accumulator.
// Why: backward passes that know each row's lse go by slices of the vocabulary, every row at once.
// Never: lets the target's own element into the buffer: it enters dX and dW in fp32.
//
//   product: a [rows, vocab of the slice] = X W^T;   a warp, 16 rows of a tile at a time:
//     factors[row] -> prob, smooth, entropy, offset, shift
//     a = -inf at the target and past the end
//     z = scale a + bias, capped;  e = exp(z - shift)
//     da = prob e - smooth c - entropy e (z - shift + offset), times the cap's slope
//     buffer [rows, vocab of the slice] = da in bf16, by TMA
#pragma once
#include "ops/linear_cross_entropy/sm90/logits_tile.cuh"

namespace talea::lce::sm90 {

struct SliceLogitsParams {
  CUtensorMap map;  // [rows, words of the slice] bf16
  RowBuffers rows;
  const RowFactors* factors = nullptr;
  const float* class_weight = nullptr;  // of the slice, or null for ones
  int vocab = 0, first_word = 0;
  LogitRule rule;
};

// kGeneral: bias, softcap, per-token scale, smoothing, the gradient of the entropy.
template <bool kGeneral>
struct SliceLogitsEpilogue : LogitsTile, WaitsForResults {
  using Params = SliceLogitsParams;
  using Filter = EveryTile;

  static __device__ __forceinline__ void ready(const Params& p) {
    if (!mutant(KernelMutant::slice_wait_left_out)) WaitsForResults::ready(p);
  }

  // The row's factors with everything folded that does not depend on the word; shift: log2 units.
  struct Row {
    float shift = INFINITY, scale = 1;  // past the end: exp(-inf) = 0
    float prob = 0, smooth = 0, entropy = 0, offset = 0;
    int target = -1;  // column within the tile, or out of range
  };

  static __device__ __forceinline__ Row begin(const Params& p, int row, int rows, int column) {
    Row r;
    r.scale = kGeneral ? p.rule.scale : p.rule.scale * kLog2E;
    if (row >= rows) return r;
    const RowFactors f = p.factors[row];
    r.shift = f.base * kLog2E;
    r.prob = f.prob * f.inverse * f.scale;
    r.target = p.rows.target[row] - p.first_word - column;
    if constexpr (kGeneral) {
      r.smooth = f.smooth * f.scale;
      r.entropy = f.entropy_up * f.inverse * f.scale;
      r.offset = f.offset;
      if (p.rows.scale) r.scale *= p.rows.scale[row];
    }
    return r;
  }

  // -inf marks the target: its element of the buffer is 0.
  template <class S>
  static __device__ __forceinline__ void mark_target(float (&acc)[S::kBlockN / 2], const Row& r,
                                                     int half) {
    const int own = r.target - 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < S::kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (own == 8 * j + e) acc[4 * j + 2 * half + e] = -INFINITY;
  }

  template <bool kCapped>
  static __device__ __forceinline__ float element(const Params& p, const Row& r, float acc,
                                                  float bias, float weight) {
    if constexpr (!kGeneral) return r.prob * exp2_fast(fmaf(acc, r.scale, -r.shift));
    const float a = fmaf(acc, r.scale, bias);
    const float z2 = kCapped ? p.rule.capped2(a) : a * kLog2E, x = z2 - r.shift;
    const float e = exp2_fast(x);
    float da = fmaf(r.prob, e, -r.smooth * weight);
    if (r.entropy != 0.f && e != 0.f) da = fmaf(-r.entropy * e, fmaf(x, kLn2, r.offset), da);
    if constexpr (kCapped) da *= p.rule.slope2(z2);
    return acc == -INFINITY ? 0.f : da;
  }

  template <bool kCapped>
  static __device__ __forceinline__ void elements(const float* acc, const Params& p,
                                                  const Row& upper, const Row& lower,
                                                  const float* bias, const float* weight,
                                                  uint32_t* packed) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* a = acc + 4 * j;
      const float b0 = bias[2 * j], b1 = bias[2 * j + 1], w0 = weight[2 * j],
                  w1 = weight[2 * j + 1];
      packed[2 * j] =
          pack(element<kCapped>(p, upper, a[0], b0, w0), element<kCapped>(p, upper, a[1], b1, w1));
      packed[2 * j + 1] =
          pack(element<kCapped>(p, lower, a[2], b0, w0), element<kCapped>(p, lower, a[3], b1, w1));
    }
  }

  static __device__ __forceinline__ void columns(const float* acc, const Params& p,
                                                 const Row& upper, const Row& lower, int column,
                                                 uint32_t* packed) {
    float bias[8] = {}, weight[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (kGeneral && p.rule.bias) read_words(p.rule.bias, p.vocab, column, bias);
    if (kGeneral && p.class_weight) read_words(p.class_weight, p.vocab, column, weight);
    if (kGeneral && p.rule.softcap > 0)
      elements<true>(acc, p, upper, lower, bias, weight, packed);
    else
      elements<false>(acc, p, upper, lower, bias, weight, packed);
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = first_row + 64 * part, own = row + lane / 4;
      const Row upper = begin(p, own, work.rows, column);
      const Row lower = begin(p, own + 8, work.rows, column);
      const bool u = static_cast<unsigned>(upper.target) < S::kBlockN;
      const bool l = static_cast<unsigned>(lower.target) < S::kBlockN;
      if (__any_sync(0xffffffffu, u || l)) {
        if (u) mark_target<S>(acc[part], upper, 0);
        if (l) mark_target<S>(acc[part], lower, 1);
      }
      if (column + S::kBlockN > p.vocab) mask_columns<S>(acc[part], p.vocab - column);
#pragma unroll
      for (int g = 0; g < S::kBlockN / 64; ++g) {
        const int first = column + 64 * g + 2 * (lane % 4);
        uint32_t packed[16];
        columns(&acc[part][32 * g], p, upper, lower, first, packed);
        columns(&acc[part][32 * g + 16], p, upper, lower, first + 32, packed + 8);
        store_piece(p.map, packed, staging, column + 64 * g, row);
      }
    }
  }
};

}  // namespace talea::lce::sm90
