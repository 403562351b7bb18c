// What: the epilogues of the two gradient products: dX = f (E W) + the target's row, dW += E^T (f
// X).
// Why: row factors, the target's own term and rank-one terms enter in fp32, rounded once.
// Never: reads or writes a row beyond those in use.
//
//   E [rows, vocab]: the chunk's buffer; f [rows]: factors; u [hidden]: rank-one term of smoothing
//   dX, tile of 128 rows, 256 columns, the words are K:
//     x = f[row] (E W) + target_factor[row] W[target[row]] - smooth[row] u
//     dX [index[row]] = x, rounded once; or, where a factor comes later, its code, and a byte for
//     64 of them the exponent that these share
//   dW, tile of 192 words, 128 columns, the rows are K:
//     w = E^T X, X multiplied by f beforehand;  w -= c[word] u'
//     kDirect: w += sum of target_factor x over the rows of this target;  dW = w, rounded once
//     else:    dW += w in fp32, by TMA's reduction
#pragma once
#include "device/sm90/gemm.cuh"
#include "ops/linear_cross_entropy/sm90/block_float.hpp"
#include "ops/linear_cross_entropy/sm90/pair.cuh"

namespace talea::lce::sm90 {

using namespace talea::sm90;

struct DxParams {
  RowBuffers rows;
  void* dx = nullptr;          // [tokens, hidden], or [rows, hidden] without an index
  const int* index = nullptr;  // where each row goes
  int64_t dx_stride = 0;
  const void* weight = nullptr;
  int64_t weight_stride = 0;
  int hidden = 0;
  const float* smooth_row = nullptr;     // [hidden]: sum_v c_v w_v, or null
  const float* smooth_factor = nullptr;  // per compacted row
  int* read = nullptr;                   // counts the tiles whose operands were read, or null
  uint8_t* exponents = nullptr;          // of dx in codes, a byte for 64, dense; or null
};

template <bool kF16, bool kF32Out>
struct DxEpilogue : WaitsFirst {
  using Params = DxParams;
  using Filter = EveryTile;

  struct Row {
    float factor = 0, target_factor = 0, smooth = 0;
    int64_t target_row = -1;  // first element of the target's row of the weight
    int place = -1;           // of the row in dX; -1: none
  };

  static __device__ __forceinline__ Row begin(const Params& p, int row, int rows) {
    Row r;
    if (row >= rows) return r;
    r.factor = p.rows.factor[row];
    r.target_factor = p.rows.target_factor[row];
    const int target = p.rows.target[row];
    if (target >= 0 && !mutant(KernelMutant::target_row_missed))
      r.target_row = target * p.weight_stride;
    if (p.smooth_row) r.smooth = p.smooth_factor[row];
    r.place = p.index ? p.index[row] : row;
    return r;
  }

  static __device__ __forceinline__ float2 value(const Params& p, const Row& r, float a, float b,
                                                 int column) {
    a *= r.factor;
    b *= r.factor;
    if (column < p.hidden) {
      if (r.target_row >= 0) {
        const float2 w = load_pair<kF16>(p.weight, r.target_row + column);
        a = fmaf(r.target_factor, w.x, a);
        b = fmaf(r.target_factor, w.y, b);
      }
      if (p.smooth_row) {
        const float2 u = *reinterpret_cast<const float2*>(p.smooth_row + column);
        a = fmaf(-r.smooth, u.x, a);
        b = fmaf(-r.smooth, u.y, b);
      }
    }
    return {a, b};
  }

  // Of the row's 64 sums of a group, and out it goes.
  static __device__ __forceinline__ uint32_t exponent_of(const Params& p, const Row& r,
                                                         const float* acc, int column) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) most = larger(larger(most, acc[4 * j]), acc[4 * j + 1]);
    most = largest_of_quad(most);
    const uint32_t exponent = BlockFloat::exponent(most);
    if (threadIdx.x % 4 == 0 && r.place >= 0 && column < p.hidden)
      p.exponents[int64_t{r.place} * BlockFloat::blocks(p.hidden) +
                  column / BlockFloat::kElements] = static_cast<uint8_t>(exponent);
    return exponent;
  }

  // 64 columns of 16 rows: through shared memory so that every row is written in whole sectors.
  template <class S>
  static __device__ __forceinline__ void group(float (&acc)[S::kBlockN / 2], const Params& p,
                                               const Row& upper, const Row& lower, int g, int row,
                                               int rows, int column, char* staging) {
    const int lane = threadIdx.x % 32, own = lane / 4;
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* sums = &acc[32 * g + 2 * half];
      const Row& r = half ? lower : upper;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float* a = sums + 4 * j;
        const float2 x = value(p, r, a[0], a[1], column + 64 * g + 8 * j + 2 * (lane % 4));
        a[0] = x.x, a[1] = x.y;
      }
      const auto put = [&](int j, uint32_t both) {
        *reinterpret_cast<uint32_t*>(staging + 1024 * half + own * 128 + ((j ^ own) * 16) +
                                     4 * (lane % 4)) = both;
      };
      if (!kF16 && p.exponents) {
        const uint32_t exponent = exponent_of(p, r, sums, column + 64 * g);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          put(j, BlockFloat::pair({sums[4 * j], sums[4 * j + 1]}, exponent));
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) put(j, pack<kF16>(sums[4 * j], sums[4 * j + 1]));
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8, piece = lane % 8, c = column + 64 * g + 8 * piece;
      if (row + r >= rows || c >= p.hidden) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(staging + r * 128 + ((piece ^ (r % 8)) * 16));
      const int64_t to = (p.index ? p.index[row + r] : row + r) * p.dx_stride + c;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.dx) + to) = v;
    }
  }

  // fp32: a quad of lanes writes a whole sector.
  template <class S>
  static __device__ __forceinline__ void group_f32(const float (&acc)[S::kBlockN / 2],
                                                   const Params& p, const Row& upper,
                                                   const Row& lower, int g, int row, int rows,
                                                   int column) {
    const int lane = threadIdx.x % 32, own = row + lane / 4;
    auto* dx = static_cast<float*>(p.dx);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float* a = &acc[4 * (8 * g + j)];
      const int c = column + 64 * g + 8 * j + 2 * (lane % 4);
      if (c >= p.hidden) continue;
      if (own < rows)
        *reinterpret_cast<float2*>(dx + upper.place * p.dx_stride + c) =
            value(p, upper, a[0], a[1], c);
      if (own + 8 < rows)
        *reinterpret_cast<float2*>(dx + lower.place * p.dx_stride + c) =
            value(p, lower, a[2], a[3], c);
    }
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
    const int lane = threadIdx.x % 32;
    // Where both groups share a tile, what one has multiplied was loaded for both.
    if (p.read && (S::kPingPong ? threadIdx.x % 128 == 0 : threadIdx.x == 128)) count_up(p.read);
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = first_row + 64 * part;
      const Row upper = begin(p, row + lane / 4, work.rows);
      const Row lower = begin(p, row + lane / 4 + 8, work.rows);
#pragma unroll
      for (int g = 0; g < S::kBlockN / 64; ++g) {
        if constexpr (kF32Out)
          group_f32<S>(acc[part], p, upper, lower, g, row, work.rows, column);
        else
          group<S>(acc[part], p, upper, lower, g, row, work.rows, column, staging);
      }
    }
  }
};

// The rows whose target lies in a stretch of the vocabulary, in ascending (target, row) order.
struct TargetShare {
  const uint64_t* sorted = nullptr;
  const int* count = nullptr;
  RowBuffers rows;
  const void* x = nullptr;
  int64_t x_stride = 0;
  int first_word = 0;  // of the product's rows

  // The first entry whose target is not below `target`.
  __device__ int lower_bound(int target) const {
    int low = 0, high = *count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<int64_t>(sorted[middle] >> 32) < target)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

struct DwParams {
  CUtensorMap dw_map;           // [vocab, hidden] fp32, or 16-bit
  const float* undo = nullptr;  // multiplies the product, or null
  bool add = true;              // false: the first chunk overwrites
  int vocab = 0, hidden = 0;
  const float* smooth_row =
      nullptr;  // [hidden]: eps / V * sum_t G_t s_t x_t of this chunk, or null
  const float* class_weight = nullptr;  // [vocab], or null for ones
  TargetShare targets;                  // kDirect only: added here, before the one rounding
  int* read = nullptr;                  // counts the tiles read of each S::kBlockM words, or null
};

// A chunk without rows adds nothing.
struct RowsFilter : EveryTile {
  bool idle;
  __device__ RowsFilter(const DwParams& p, int rows, uint32_t* scratch)
      : EveryTile(p, rows, scratch), idle(p.add && rows == 0) {}
  __device__ bool none() const { return idle; }
};

// kDirect: the product covers every row, and dW is rounded once on its way out. It runs beside the
// tail of the dX product, which reads the same inputs, and before the next slice's logits.
template <bool kF16, bool kDirect, class Waits = WaitsLast>
struct DwEpilogue : Waits {
  using Params = DwParams;
  using Filter = RowsFilter;
  static constexpr int kColumns = kDirect ? 64 : 32;  // of one staged piece: 128 bytes
  static constexpr int kPieceBytes = 2048;            // 16 rows of them

  // acc += coefficient * x for the rows whose target is one of this warp's 16 words.
  template <int kHalf>
  static __device__ __forceinline__ void add_targets(float (&acc)[kHalf], const Params& p, int row,
                                                     int column) {
    const int lane = threadIdx.x % 32;
    const TargetShare& t = p.targets;
    const int end = *t.count;
    for (int i = t.lower_bound(t.first_word + row); i < end; ++i) {
      const uint64_t key = t.sorted[i];
      const int64_t word = static_cast<int64_t>(key >> 32) - t.first_word - row;
      if (word >= 16) break;
      if (word % 8 != lane / 4) continue;
      const auto entry = static_cast<uint32_t>(key);
      const float f = t.rows.target_factor[entry];
      const int64_t x = t.rows.index[entry] * t.x_stride;
      const float upper = word < 8 ? f : 0.f, lower = word < 8 ? 0.f : f;
#pragma unroll
      for (int j = 0; j < kHalf / 4; ++j) {
        const int c = column + 8 * j + 2 * (lane % 4);
        if (c >= p.hidden) continue;
        const float2 pair = load_pair<kF16>(t.x, x + c);
        const float a = pair.x, b = pair.y;
        acc[4 * j] = fmaf(upper, a, acc[4 * j]), acc[4 * j + 1] = fmaf(upper, b, acc[4 * j + 1]);
        acc[4 * j + 2] = fmaf(lower, a, acc[4 * j + 2]);
        acc[4 * j + 3] = fmaf(lower, b, acc[4 * j + 3]);
      }
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void put(char* staging, int j, float2 u, float2 l) {
    const int lane = threadIdx.x % 32, own = lane / 4;
    if constexpr (kDirect) {
      const int at = own * 128 + ((j ^ own) * 16) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(staging + at) = pack<kF16>(u.x, u.y);
      *reinterpret_cast<uint32_t*>(staging + 1024 + at) = pack<kF16>(l.x, l.y);
    } else {
      const int at = own * 128 + (((2 * j + lane % 4 / 2) ^ own) * 16) + 8 * (lane % 2);
      *reinterpret_cast<float2*>(staging + at) = u;
      *reinterpret_cast<float2*>(staging + 1024 + at) = l;
    }
  }

  static __device__ __forceinline__ void fill(const float* acc, const Params& p, float upper,
                                              float lower, int column, char* staging) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float* a = acc + 4 * j;
      float2 u{a[0], a[1]}, l{a[2], a[3]};
      const int c = column + 8 * j + 2 * static_cast<int>(threadIdx.x % 4);
      if (p.smooth_row && c < p.hidden) {
        const float2 q = *reinterpret_cast<const float2*>(p.smooth_row + c);
        u.x = fmaf(-upper, q.x, u.x), u.y = fmaf(-upper, q.y, u.y);
        l.x = fmaf(-lower, q.x, l.x), l.y = fmaf(-lower, q.y, l.y);
      }
      put(staging, j, u, l);
    }
  }

  // kPieces pieces at once, one behind the other in the staging memory: a fence for all of them.
  template <int kPieces>
  static __device__ __forceinline__ void send(const float* acc, const Params& p, float upper,
                                              float lower, int row, int column, char* staging) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      fill(acc + kColumns / 2 * i, p, upper, lower, column + kColumns * i,
           staging + kPieceBytes * i);
    fence_async_shared();
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (column + kColumns * i >= p.hidden) break;
      if (!kDirect && p.add)
        reduce_add_tile(&p.dw_map, staging + kPieceBytes * i, column + kColumns * i, row);
      else
        store_tile(&p.dw_map, staging + kPieceBytes * i, column + kColumns * i, row);
    }
    store_commit();
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
    if (p.read && threadIdx.x % 128 == 0) count_up(p.read + first_row / S::kBlockM);
    if (p.add && work.k_blocks == 0) return;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = first_row + 64 * part;
      float upper = 0, lower = 0;
      if (p.smooth_row) {
        const int u = row + static_cast<int>(threadIdx.x % 32) / 4, l = u + 8;
        upper = u >= p.vocab ? 0.f : p.class_weight ? p.class_weight[u] : 1.f;
        lower = l >= p.vocab ? 0.f : p.class_weight ? p.class_weight[l] : 1.f;
      }
      if (kF16 && p.undo) {
        const float f = *p.undo;
#pragma unroll
        for (int i = 0; i < S::kBlockN / 2; ++i) acc[part][i] *= f;
      }
      if (kDirect && p.targets.sorted) add_targets(acc[part], p, row, column);
      constexpr int kPieces = S::kStagingBytes / kPieceBytes;
      static_assert(S::kBlockN / kColumns % kPieces == 0, "whole turns of the staging memory");
#pragma unroll
      for (int g = 0; g < S::kBlockN / kColumns; g += kPieces)
        if (column + kColumns * g < p.hidden)
          send<kPieces>(&acc[part][kColumns / 2 * g], p, upper, lower, row, column + kColumns * g,
                        staging);
    }
  }
};

}  // namespace talea::lce::sm90
