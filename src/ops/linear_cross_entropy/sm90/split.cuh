// What: the epilogue of a dW product that adds to a sum of two numbers: bf16 and what it left.
// Why: chunks add into the caller's 16-bit gradient with the digits of a longer sum.
// Never: reads a piece that another block writes.
//
//   for each of a warp's pieces [16 words, 64 columns] of the tile:
//     shared <- dW (bf16) and rest, while the product or the piece before is at work
//     sum = join(dW, rest) + accumulator;  dW = bf16(sum);  rest = sum - dW
//     dW, rest <- shared
#pragma once
#include "ops/linear_cross_entropy/sm90/gradients.cuh"

namespace talea::lce::sm90 {

struct SplitParams : DwParams {  // dw_map: bf16
  char* rest = nullptr;
  int pieces = 0;     // of a row of pieces
  bool ends = false;  // the last chunk: dW is left rounded
};

// A chunk without rows adds nothing, but the last one rounds.
struct SplitFilter : EveryTile {
  bool idle;
  __device__ SplitFilter(const SplitParams& p, int rows, uint32_t* scratch)
      : EveryTile(p, rows, scratch), idle(p.add && rows == 0 && !p.ends) {}
  __device__ bool none() const { return idle; }
};

// The rank-one share of label smoothing, of 64 columns of a warp's 16 words.
__device__ __forceinline__ void smooth_piece(float* acc, const DwParams& p, int row, int column) {
  const int u = row + static_cast<int>(threadIdx.x % 32) / 4, l = u + 8;
  const float upper = u >= p.vocab ? 0.f : p.class_weight ? p.class_weight[u] : 1.f;
  const float lower = l >= p.vocab ? 0.f : p.class_weight ? p.class_weight[l] : 1.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int c = column + 8 * j + 2 * static_cast<int>(threadIdx.x % 4);
    if (c >= p.hidden) continue;
    const float2 s = *reinterpret_cast<const float2*>(p.smooth_row + c);
    acc[4 * j] = fmaf(-upper, s.x, acc[4 * j]);
    acc[4 * j + 1] = fmaf(-upper, s.y, acc[4 * j + 1]);
    acc[4 * j + 2] = fmaf(-lower, s.x, acc[4 * j + 2]);
    acc[4 * j + 3] = fmaf(-lower, s.y, acc[4 * j + 3]);
  }
}

template <int kBits>
struct SplitEpilogue {
  using Params = SplitParams;
  using Filter = SplitFilter;
  // Staging memory of a warp: pieces of dW, as many of the rest, their barriers.
  static constexpr int kBuffers = kBits == 8 ? 2 : 3;
  static constexpr int kHigh = 2048, kLow = Rest::piece_bytes(kBits),
                       kLowRoom = kBits == 8 ? 1024 : 512;
  static constexpr int kLowAt = kBuffers * kHigh, kBarriersAt = kLowAt + kBuffers * kLowRoom;
  static constexpr int kStagingBytes = 8192;  // a multiple of 1024, as TMA's swizzle
  static_assert(kBarriersAt + 32 <= kStagingBytes);

  struct Place {
    uint64_t* barrier;  // one a buffer
    uint32_t* phases;   // a bit each
    __device__ explicit Place(char* staging)
        : barrier(reinterpret_cast<uint64_t*>(staging + kBarriersAt)),
          phases(reinterpret_cast<uint32_t*>(barrier + kBuffers)) {}
  };

  static __device__ __forceinline__ void before(const Params& p) { WaitsLast::before(p); }
  static __device__ __forceinline__ void ready(const Params&) {}
  static __device__ __forceinline__ void after(const Params& p) { WaitsLast::after(p); }

  static __device__ __forceinline__ void start(char* staging) {
    if (threadIdx.x % 32 == 0) {
      const Place place(staging);
      for (int i = 0; i < kBuffers; ++i) barrier_init(place.barrier + i, 1);
      *place.phases = 0;
      barrier_init_fence();
    }
    __syncwarp();
  }

  // Piece i of the warp's: 64 rows further every second one.
  static constexpr int kPieces = 6;
  static __device__ __forceinline__ bool exists(const Params& p, int row, int column) {
    return row < p.vocab && column < p.hidden;
  }
  static __device__ __forceinline__ char* rest_at(const Params& p, int row, int column) {
    return p.rest + (static_cast<int64_t>(row / 16) * p.pieces + column / 64) * kLow;
  }

  // One lane: piece i of the tile on its way in. What lay there has gone out.
  static __device__ __forceinline__ void load(const Params& p, int first_row, int first_column,
                                              int i, char* staging) {
    const int row = first_row + 64 * (i / 2), column = first_column + 64 * (i % 2);
    if (i >= kPieces || !exists(p, row, column)) return;
    const int buffer = i % kBuffers;
    uint64_t* barrier = Place(staging).barrier + buffer;
    barrier_expect(barrier, kHigh + kLow);
    load_tile(&p.dw_map, barrier, staging + buffer * kHigh, column, row);
    if constexpr (kBits >= 4)
      load_bytes(rest_at(p, row, column), barrier, staging + kLowAt + buffer * kLowRoom, kLow);
  }

  template <class S>
  static __device__ __forceinline__ void fetch(const Params& p, const TileOrder<S>& work,
                                               int first_row, int column, char* staging) {
    if (!p.add || (work.k_blocks == 0 && !p.ends) || threadIdx.x % 32 != 0) return;
    store_wait_read<0>();
    for (int i = 0; i < kBuffers - 1; ++i) load(p, first_row, column, i, staging);
  }

  static __device__ __forceinline__ void await(int buffer, char* staging) {
    const Place place(staging);
    const uint32_t phases = *place.phases;
    barrier_wait(place.barrier + buffer, phases >> buffer & 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) *place.phases = phases ^ (1u << buffer);
  }

  // Between chunks a sum is cut off, not rounded: dW has its upper 16 bits, the rest the next ones.
  // Reading it back, bits of its neighbours stand below them: half a unit on average, as much as
  // the cut took. A byte permutation an element each way. The last chunk leaves dW rounded.
  //
  // Four blocks of eight columns: old words of dW and of the rest -> their sums.
  static __device__ __forceinline__ float joined(uint32_t both, int e, const uint32_t* rest,
                                                 int i) {
    const int element = e % 2, byte = e;  // of block i: two of the upper row, two of the lower
    if constexpr (kBits == 0) return __uint_as_float(element ? both & 0xffff0000u : both << 16);
    const uint32_t low = kBits == 8 ? rest[i] : i % 2 ? rest[i / 2] : rest[i / 2] << 4;
    return __uint_as_float(
        __byte_perm(both, low, (element ? 0x3200 : 0x1000) | (4 + byte) << 4 | (4 + byte)));
  }
  // The rest of block i's four sums, into the words of four blocks.
  static __device__ __forceinline__ void cut(const float (&x)[4], uint32_t (&rest)[4], int i) {
    if constexpr (kBits == 0) return;
    const uint32_t upper = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x0051);
    const uint32_t lower = __byte_perm(__float_as_uint(x[2]), __float_as_uint(x[3]), 0x0051);
    const uint32_t bytes = __byte_perm(upper, lower, 0x5410);
    if constexpr (kBits == 8) rest[i] = bytes;
    if constexpr (kBits == 4)
      rest[i / 2] = i % 2 ? rest[i / 2] | (bytes & 0xf0f0f0f0u) : bytes >> 4 & 0x0f0f0f0fu;
  }
  static __device__ __forceinline__ void round(const float (&x)[4], uint32_t (&both)[2],
                                               uint32_t (&rest)[4], int i) {
    uint32_t left = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t r[2];
      both[h] = Pair<kBits>::part({x[2 * h], x[2 * h + 1]}, r[0], r[1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) left |= Pair<kBits>::placed(r[e], 4 * i + 2 * h + e);
    }
    if constexpr (kBits == 8) rest[i] = left;
    if constexpr (kBits == 4) rest[i / 2] = i % 2 ? rest[i / 2] | left : left;
  }

  // acc: 32 accumulators, four a block of eight columns: two of the upper row, two of the lower.
  // Four blocks at a time are read, then added, then written: their arithmetic overlaps.
  template <bool kAdd, bool kEnds>
  static __device__ __forceinline__ void add(const float* acc, char* high, char* low) {
    const int lane = threadIdx.x % 32, own = lane / 4;
    constexpr int kWords = kBits / 2;  // of the rest of four blocks: 4 or 2
    auto* words = reinterpret_cast<uint32_t*>(low) + 4 * lane;
    const auto at = [&](int j, int h) {
      return reinterpret_cast<uint32_t*>(high + 1024 * h + own * 128 + ((j ^ own) * 16) +
                                         4 * (lane % 4));
    };
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t had[4] = {}, rest[4] = {}, both[4][2];
      // 8 bits: a vector of 16 bytes; 4 bits: a half of one.
      uint32_t* own_words = kBits == 8 ? words + 128 * q : words + 2 * q;
      if constexpr (kAdd) {
        if constexpr (kBits == 8) {
          const uint4 four = *reinterpret_cast<const uint4*>(own_words);
          had[0] = four.x, had[1] = four.y, had[2] = four.z, had[3] = four.w;
        } else if constexpr (kBits == 4) {
          const uint2 two = *reinterpret_cast<const uint2*>(own_words);
          had[0] = two.x, had[1] = two.y;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) both[i / 2][i % 2] = *at(4 * q + i / 2, i % 2);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* a = acc + 4 * (4 * q + i);
        float x[4] = {a[0], a[1], a[2], a[3]};
        if constexpr (kAdd) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] += joined(both[i][e / 2], e, had, i);
        }
        if (kEnds || kBits == 0) {
          round(x, both[i], rest, i);
        } else {
          cut(x, rest, i);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            both[i][h] =
                __byte_perm(__float_as_uint(x[2 * h]), __float_as_uint(x[2 * h + 1]), 0x7632);
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) *at(4 * q + i / 2, i % 2) = both[i / 2][i % 2];
      if constexpr (kWords == 4)
        *reinterpret_cast<uint4*>(own_words) = {rest[0], rest[1], rest[2], rest[3]};
      else if constexpr (kWords == 2)
        *reinterpret_cast<uint2*>(own_words) = {rest[0], rest[1]};
    }
  }

  template <class S>
  static __device__ __forceinline__ void run(Accumulators<S>& acc, const Params& p,
                                             const TileOrder<S>& work, int first_row, int column,
                                             char* staging) {
    static_assert(S::kParts * S::kBlockN / 64 == kPieces && S::kStagingBytes == kStagingBytes);
    const int lane = threadIdx.x % 32;
    if (p.read && threadIdx.x % 128 == 0) count_up(p.read + first_row / S::kBlockM);
    if (p.add && work.k_blocks == 0 && !p.ends) return;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = first_row + 64 * (i / 2), c = column + 64 * (i % 2), buffer = i % kBuffers;
      if (kBuffers == 2 && p.add && lane == 0) {
        store_wait_read<0>();
        load(p, first_row, column, i + 1, staging);
      }
      if (!exists(p, row, c)) continue;
      if (p.add)
        await(buffer, staging);
      else if (lane == 0)
        store_wait_read<kBuffers - 1>();
      __syncwarp();
      float* own = &acc[i / 2][32 * (i % 2)];
      if (p.smooth_row) smooth_piece(own, p, row, c);
      char *high = staging + buffer * kHigh, *low = staging + kLowAt + buffer * kLowRoom;
      if (p.add) {
        p.ends ? add<true, true>(own, high, low) : add<true, false>(own, high, low);
      } else {
        p.ends ? add<false, true>(own, high, low) : add<false, false>(own, high, low);
      }
      fence_async_shared();
      __syncwarp();
      if (lane != 0) continue;
      if (kBuffers > 2 && p.add) {  // into the buffer of the piece before, on its way since then
        store_wait_read<0>();
        load(p, first_row, column, i + 2, staging);
      }
      store_tile(&p.dw_map, high, c, row);
      if constexpr (kBits >= 4) store_bytes(rest_at(p, row, c), low, kLow);
      store_commit();
    }
  }
};

}  // namespace talea::lce::sm90
