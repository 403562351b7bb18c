// What: the warpgroup of lane sm90 that fills tiles from packed FP8 rows: 656 bytes become 576
// columns of bf16 in shared memory, in one block's or in both of a cluster.
// Why: a dequantised copy would be read and written once more than the rows themselves.
// Never: takes a scale through fewer bits than it has: x = e4m3 * scale in fp32, rounded once.
#pragma once

#include "device/sm90/cluster.cuh"
#include "ops/sparse_attention/sm90/produce.cuh"

namespace talea::sparse_attention::sm90 {

// KvStorage::fp8_656: where what lies in a row, in bytes.
inline constexpr int packed_row_bytes = 656, packed_tile = 128, packed_scales_at = 512;
inline constexpr int packed_rest_at = 528;

__device__ inline uint32_t bf16_of(uint32_t e4m3x2, float scale) {
  uint32_t halves, out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(e4m3x2)));
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(x.y * scale), "f"(x.x * scale));
  return out;
}
__device__ inline uint4 bf16_of(uint32_t low, uint32_t high, float scale) {
  return make_uint4(bf16_of(low, scale), bf16_of(low >> 16, scale), bf16_of(high, scale),
                    bf16_of(high >> 16, scale));
}

// The same numbers by fewer and quicker instructions, where the scale has no more digits than bf16
// and no byte is NaN. The bits of an e4m3 number, moved to their places in bf16, are that number
// times 2^-120; the product with a scale so much larger is rounded once.
inline constexpr float least_short = 0x1p-100f, most_short = 0x1p7f, moved_by = 0x1p120f;
__device__ inline bool is_short(float scale) {
  return (__float_as_uint(scale) & 0xffff) == 0 && scale >= least_short && scale < most_short;
}
__device__ inline uint32_t nans_of(uint32_t e4m3x4) {
  return ((e4m3x4 & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}
__device__ inline uint32_t product_of(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ inline uint2 short_bf16_of(uint32_t e4m3x4, uint32_t scales) {
  const uint32_t low = e4m3x4 << 4 & 0xf0f0f0f0;
  const uint32_t high = (e4m3x4 >> 4 & 0x07070707) | (e4m3x4 & 0x80808080);
  return make_uint2(product_of(__byte_perm(low, high, 0x5140), scales),
                    product_of(__byte_perm(low, high, 0x7362), scales));
}

// Sixteen numbers of one scale: in the order of their columns, eight and eight.
struct Sixteen {
  uint4 first, second;
};
__device__ inline Sixteen sixteen_of(const uint4& x, float scale) {
  const uint32_t nans = nans_of(x.x) | nans_of(x.y) | nans_of(x.z) | nans_of(x.w);
  if (!__all_sync(~0u, is_short(scale) && nans == 0))
    return {bf16_of(x.x, x.y, scale), bf16_of(x.z, x.w, scale)};
  const uint32_t grown = __float_as_uint(scale * moved_by);
  const uint32_t scales = __byte_perm(grown, 0, 0x3232);
  const uint2 a = short_bf16_of(x.x, scales), b = short_bf16_of(x.y, scales);
  const uint2 c = short_bf16_of(x.z, scales), d = short_bf16_of(x.w, scales);
  return {make_uint4(a.x, a.y, b.x, b.y), make_uint4(c.x, c.y, d.x, d.y)};
}

// A tile is filled in halves of its columns. Half 0 is 256 columns of e4m3; half 1 as many, and the
// 64 that are bf16 already. A block alone fills both tiles of a pair in the order of produce.cuh;
// in a cluster each block fills the tile of its rank, first the half whose scores come first.
template <bool kShared>
struct PackedOrder {
  static constexpr int parts = kShared ? 2 : 4;
  int rank;
  __device__ int tile(int i) const {
    if constexpr (kShared) return rank;
    return i % 2;
  }
  __device__ int half(int i) const {
    if constexpr (kShared) return i ^ rank;
    return i == 0 || i == 3 ? 0 : 1;
  }
};

// A thread has 16 bytes of one piece of four rows. Lanes 4..7 of each eight take the row of the
// eight beside: the two halves of a line then lie in unlike banks.
template <bool kShared>
struct PackedCopier {
  const Forward& f;
  uint32_t first;  // address of the tiles
  int piece, row;  // of 8 pieces; of a warp's four rows of each 16
  uint32_t line;   // of row 0 of the four, within a chunk
  int turn;
  uint32_t other;  // what an address grows by in the other block

  __device__ PackedCopier(const Forward& forward, const Tiles& tiles, int thread)
      : f(forward),
        first(talea::sm90::smem_address(tiles.keys(0))),
        piece(thread % 8),
        row((thread % 32 / 8) ^ (thread % 8 / 4)),
        line(static_cast<uint32_t>(thread / 32 * 4 + row) * 128),
        turn((thread / 32 * 4 + row) % 8),
        other(0) {
    if constexpr (kShared)
      other = talea::sm90::address_at(first, talea::sm90::cluster_rank() ^ 1) - first;
  }
  __device__ const char* bytes(int64_t at) const {
    return static_cast<const char*>(f.kv.data) + at;
  }
  // rows: of slot_of_lane's slot, in bytes; -1: absent.
  __device__ uint4 load(int64_t rows, int tile, int j, int byte) const {
    const int64_t at = __shfl_sync(~0u, rows, tile * 16 + j * 4 + row);
    uint4 x;
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ge.s64 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(bytes(at + byte) + piece * 16), "l"(at));
    return x;
  }
  // Lane l: that of row l % 16 (1 of an absent one, whose bytes are 0), of the first or second 128
  // columns of a half.
  __device__ float load_scale(int64_t rows, int tile, int half) const {
    const int lane = threadIdx.x % 32;
    const int64_t at = __shfl_sync(~0u, rows, tile * 16 + lane % 16);
    float x;
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ge.s64 p, %2, 0;\n"
        "mov.b32 %0, 0f3f800000;\n"
        "@p ld.global.nc.b32 %0, [%1];\n}"
        : "=&f"(x)
        : "l"(bytes(at + packed_scales_at) + 8 * half + lane / 16 * 4), "l"(at));
    return x;
  }
  __device__ void put(uint32_t to, const uint4& x, uint32_t ready) const {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
    if constexpr (kShared) talea::sm90::store_words_async(other + to, x, other + ready);
  }
};

template <int kHalf, bool kShared>
__device__ void produce_packed(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  namespace ptx = talea::sm90;
  static_assert(kHalf == 256 && parts_of_half(kHalf) == 1);
  using Order = PackedOrder<kShared>;
  const int warp = thread / 32, lane = thread % 32;
  const Order order = {kShared ? static_cast<int>(ptx::cluster_rank()) : 0};
  const PackedCopier<kShared> copier(f, tiles, thread);
  const Ahead& ahead = beside.ahead;
  uint32_t works = 0, pairs_done = 0;
  int pairs = 0, slot = 0;  // of the work ahead
  int64_t next = -1;
  uint4 raw[4];
  float scale = 0;

  // The list of a work; all threads see it.
  const auto open = [&](int64_t number) {
    ptx::named_barrier_sync(1, producer_threads);
    if (thread == 0) {
      Ahead a = {};
      if (number < f.work) {
        const Work w = work_of(f, number);
        a = {.query = cuda::query_rule(f.tables, w.b, w.s),
             .at = cuda::offset(f.tables.indices, w.b, w.s, w.g),
             .stride = f.tables.indices.stride[3],
             .b = w.b,
             .s = w.s,
             .g = w.g,
             .slot = first_slot(w),
             .pairs = 0,
             .counts = f.counters && (kShared ? w.tile < 2 : w.tile == 0)};
        if (w.heads > 0 || a.counts) a.pairs = pairs_of(f, w, a.query.slots);
      }
      beside.ahead = a;
    }
    ptx::named_barrier_sync(1, producer_threads);
    pairs = ahead.pairs;
    slot = static_cast<int>(ahead.slot) +
           (kShared ? order.rank * tile_keys + slot_of_lane(warp, lane % 16)
                    : slot_of_lane(warp, lane));
  };
  // The rows of the pair after, on their way into the cache. In a cluster lanes repeat each other.
  const auto look_ahead = [&] {
    const bool own = !kShared || lane < 16;
    next = -1;
    if (slot < ahead.query.slots) {
      const int64_t index = cuda::integer_at(f.tables.indices, ahead.at + slot * ahead.stride);
      const KeyRow found = find_key(f.tables.rule, ahead.query, slot, index);
      if (ahead.counts && found.kind == SlotKind::foreign && own)
        cuda::count(f.tables, f.counters, ahead.b, ahead.s, ahead.g, slot);
      if (found.kind == SlotKind::valid)
        next = cuda::offset(f.kv, found.outer, found.inner, ahead.g);
    }
    slot += 2 * tile_keys;
    if (next < 0 || !own) return;
#pragma unroll
    for (int byte = 0; byte < packed_row_bytes; byte += 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(copier.bytes(next + byte)));
  };
  const auto load = [&](int64_t rows, int i, int k) {
    return copier.load(rows, order.tile(i), k % 4, (2 * order.half(i) + k / 4) * packed_tile);
  };
  const auto begin = [&] {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) raw[k] = load(next, 0, k);
    scale = copier.load_scale(next, order.tile(0), order.half(0));
  };

  open(blockIdx.x);
  if (pairs > 0) look_ahead();
  begin();
  for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
    const int count = pairs;
    ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
    if (thread == 0) beside.pairs = count;
    copy_queries(f, work_of(f, number), Copier(thread, f.dim), ptx::smem_address(tiles.base),
                 tiles.plan.columns, thread);
    ptx::barrier_arrive_after_copies(&beside.q_ready);
    if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
    for (int pair = 0; pair < count || pair == 0; ++pair) {
      const int64_t rows = next;
      if (pair + 1 >= count) open(number + gridDim.x);
      next = -1;
      if (pair + 1 < count || pairs > 0) look_ahead();
      if (count == 0) {
        begin();
        break;
      }
      __syncwarp();
      const unsigned valid = __ballot_sync(~0u, rows >= 0);
#pragma unroll 1
      for (int i = 0; i < Order::parts; ++i) {
        const int tile = order.tile(i), half = order.half(i), i1 = (i + 1) % Order::parts;
        const int64_t after = i + 1 < Order::parts ? rows : next;
        const uint32_t to = copier.first + tile * tiles.plan.keys * chunk_bytes + copier.line;
        const uint32_t ready = ptx::smem_address(&beside.keys_ready[tile][half]);
        const float coming = copier.load_scale(after, order.tile(i1), order.half(i1));
        ptx::barrier_wait(&beside.keys_free[tile][half], (pairs_done & 1) ^ 1);
        // Of the 16-byte pieces on their way, four at a time, the fourth after this one.
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const int j = k % 4, place = copier.piece % 4 * 2;
          const float x = __shfl_sync(~0u, scale, k / 4 * 16 + j * 4 + copier.row);
          const uint32_t at =
              to + (4 * half + k / 4 * 2 + copier.piece / 4) * chunk_bytes + j * 2048;
          const Sixteen sixteen = sixteen_of(raw[j], x);
          copier.put(at + (place ^ copier.turn) * 16, sixteen.first, ready);
          copier.put(at + ((place + 1) ^ copier.turn) * 16, sixteen.second, ready);
          if (k < 4)
            raw[j] = load(rows, i, k + 4);
          else if (half == 1)
            raw[j] = copier.load(rows, tile, j, packed_rest_at);
          else
            raw[j] = load(after, i1, j);
        }
        if (half == 1)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            copier.put(to + 8 * chunk_bytes + j * 2048 + (copier.piece ^ copier.turn) * 16, raw[j],
                       ready);
            raw[j] = load(after, i1, j);
          }
        scale = coming;
        // With the first half: which slots are valid.
        if (half == tile && lane == 0) {
          const uint32_t bits = (kShared ? valid : valid >> (16 * tile)) & 0xffff;
          beside.valid[tile][warp] = bits;
          if constexpr (kShared)
            ptx::store_word_async(copier.other + ptx::smem_address(&beside.valid[tile][warp]), bits,
                                  copier.other + ready);
        }
        ptx::fence_async_shared();
        ptx::barrier_arrive(&beside.keys_ready[tile][half]);
      }
      ++pairs_done;
    }
  }
}

}  // namespace talea::sparse_attention::sm90
