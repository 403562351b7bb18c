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

// Eight numbers of a short scale, which is given twice and as bf16, grown.
__device__ inline uint4 short_bf16_of(const uint2& e4m3, uint32_t scales) {
  const uint2 a = short_bf16_of(e4m3.x, scales), b = short_bf16_of(e4m3.y, scales);
  return make_uint4(a.x, a.y, b.x, b.y);
}
__device__ inline uint32_t grown_twice(float scale) {
  return __byte_perm(__float_as_uint(scale * moved_by), 0, 0x3232);
}

// A tile is filled in halves of its columns. Half 0 is 256 columns of e4m3; half 1 as many, and the
// 64 that are bf16 already. A thread takes two rows of a half at a time: of a block alone, which
// fills the parts in the order of produce.cuh, two and then the two others; in a cluster each block
// fills two of four for both, and each tile as a whole before the next: what multiplies one has
// begun while the other one is on its way.
template <bool kShared>
struct PackedUnit {
  static constexpr int count = kShared ? 4 : 8;  // of a pair of tiles
  int tile, half, first_row;                     // of four rows, 16 lines apart
  bool begins, ends;                             // a part
  __device__ PackedUnit(int n, int rank) {
    if constexpr (kShared) {
      tile = n / 2, half = (n % 2) ^ tile, first_row = 2 * rank;
      begins = ends = true;
    } else {
      const int part = n / 2;
      tile = part % 2, half = part == 0 || part == 3 ? 0 : 1, first_row = 2 * (n % 2);
      begins = n % 2 == 0, ends = n % 2 == 1;
    }
  }
};

// What one of eight lanes has of a half of two rows: 8 numbers of each of four chunks; the scales
// of the first and the last two; 8 of the columns that are bf16 already.
struct PackedPieces {
  uint2 e4m3[2][4];
  float2 scale[2];
  uint4 rest[2];
};

// Eight lanes take a row: what they write at a time is a line of 128 bytes. In a cluster the lines
// are then sent to the other block.
template <bool kShared>
struct PackedCopier {
  using Unit = PackedUnit<kShared>;
  const Forward& f;
  uint32_t first;  // address of the tiles
  int piece, row;  // of 8; of a warp's four rows of each 16
  uint32_t to;     // of this lane's 16 bytes of a line of the first of four rows, within a tile
  uint32_t other;  // what an address grows by in the other block

  __device__ PackedCopier(const Forward& forward, const Tiles& tiles, int thread)
      : f(forward),
        first(talea::sm90::smem_address(tiles.keys(0))),
        piece(thread % 8),
        row(thread % 32 / 8),
        to(static_cast<uint32_t>(thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16)),
        other(0) {
    if constexpr (kShared)
      other = talea::sm90::address_at(first, talea::sm90::cluster_rank() ^ 1) - first;
  }
  __device__ const char* bytes(int64_t at) const {
    return static_cast<const char*>(f.kv.data) + at;
  }
  // The slot of a pair that a lane finds the row of: see slot_of_lane. In a cluster lanes 16..31
  // repeat the others.
  __device__ static int slot_of(int warp, int lane, int rank) {
    if constexpr (!kShared) return slot_of_lane(warp, lane);
    return lane / 8 % 2 * tile_keys + (2 * rank + lane / 4 % 2) * 16 + warp * 4 + lane % 4;
  }
  // rows: of slot_of's slot, in bytes; -1: absent, of zeros and a scale of 1. later: a number whose
  // making ends before these loads begin.
  __device__ void load(PackedPieces& x, int64_t rows, const Unit& u, unsigned later) const {
    const int lanes = (kShared ? u.tile * 8 : u.tile * 16 + u.first_row * 4) + row +
                      static_cast<int>(later & blockIdx.y);  // 0
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int lane = lanes + i * 4;
      const int64_t at = __shfl_sync(~0u, rows, lane);
      const char* from = bytes(at) + u.half * 256 + piece * 8;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        asm volatile(
            "{\n.reg .pred p;\n"
            "setp.ge.s64 p, %3, 0;\n"
            "mov.b32 %0, 0;\nmov.b32 %1, 0;\n"
            "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
            : "=&r"(x.e4m3[i][c].x), "=&r"(x.e4m3[i][c].y)
            : "l"(from + c * chunk_columns), "l"(at));
      asm volatile(
          "{\n.reg .pred p;\n"
          "setp.ge.s64 p, %3, 0;\n"
          "mov.b32 %0, 0f3f800000;\nmov.b32 %1, 0f3f800000;\n"
          "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
          : "=&f"(x.scale[i].x), "=&f"(x.scale[i].y)
          : "l"(bytes(at + packed_scales_at) + 8 * u.half), "l"(at));
      asm volatile(
          "{\n.reg .pred p;\n"
          "setp.ge.s64 p, %5, 0;\n"
          "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
          "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
          : "=&r"(x.rest[i].x), "=&r"(x.rest[i].y), "=&r"(x.rest[i].z), "=&r"(x.rest[i].w)
          : "l"(bytes(at + packed_rest_at) + piece * 16), "l"(u.half == 1 ? at : int64_t{-1}));
    }
  }
  __device__ static void put(uint32_t at, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
  }
  // The lanes whose numbers may go the quick way. What is loaded after this need not arrive before
  // these numbers are converted: loads have few counters, and would else be waited for together.
  __device__ static unsigned quick_lanes(const PackedPieces& x) {
    uint32_t nans = 0;
    bool quick = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) nans |= nans_of(x.e4m3[i][c].x) | nans_of(x.e4m3[i][c].y);
      quick = quick & is_short(x.scale[i].x) & is_short(x.scale[i].y);
    }
    return __ballot_sync(~0u, quick & (nans == 0));
  }
  // tile: its address. ready: of the barrier of the unit's part. The last chunk goes to the other
  // block from registers: of tile 0 the weights take its place here, which nobody tells them that a
  // bulk copy has read.
  __device__ void put(const PackedPieces& x, bool quick, uint32_t tile, const Unit& u,
                      uint32_t ready) const {
    const uint32_t at = tile + to + u.first_row * 2048 + 4 * u.half * chunk_bytes;
    if (quick) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t scales[2] = {grown_twice(x.scale[i].x), grown_twice(x.scale[i].y)};
#pragma unroll
        for (int c = 0; c < 4; ++c)
          put(at + i * 2048 + c * chunk_bytes, short_bf16_of(x.e4m3[i][c], scales[c / 2]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          put(at + i * 2048 + c * chunk_bytes,
              bf16_of(x.e4m3[i][c].x, x.e4m3[i][c].y, c < 2 ? x.scale[i].x : x.scale[i].y));
    }
    if (u.half != 1) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t last = at + i * 2048 + 4 * chunk_bytes;
      put(last, x.rest[i]);
      if constexpr (kShared) talea::sm90::store_words_async(other + last, x.rest[i], other + ready);
    }
  }
  // To the other block: the 32 rows of each of four chunks that this one has filled. Called by a
  // warp.
  __device__ void send(uint32_t tile, const Unit& u, int lane, uint32_t ready) const {
    constexpr uint32_t bytes = chunk_bytes / 2;
    if (lane >= 4) return;
    const uint32_t from = tile + (4 * u.half + lane) * chunk_bytes + u.first_row * 2048;
    talea::sm90::send_bytes(other + from, from, bytes, other + ready);
  }
};

template <int kHalf, bool kShared>
__device__ void produce_packed(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  namespace ptx = talea::sm90;
  static_assert(kHalf == 256 && parts_of_half(kHalf) == 1);
  using Unit = PackedUnit<kShared>;
  const int warp = thread / 32, lane = thread % 32;
  const int rank = kShared ? static_cast<int>(ptx::cluster_rank()) : 0;
  const PackedCopier<kShared> copier(f, tiles, thread);
  const Ahead& ahead = beside.ahead;
  uint32_t works = 0, pairs_done = 0;
  int pairs = 0, slot = 0;  // of the work ahead
  int64_t next = -1;
  int2 index = {-1, -1};   // words of that of the slot ahead, on their way since the pair before
  PackedPieces pieces[2];  // of this unit and the next

  const bool wide = f.tables.indices.dtype == DType::i64;
  const auto read_index = [&] {
    const int64_t at = ahead.at + slot * ahead.stride;
    asm volatile(
        "{\n.reg .pred p, q;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "setp.ne.b32 q, %4, 0;\n"
        "@p ld.global.nc.b32 %0, [%2];\n"
        "@q ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
        : "+r"(index.x), "+r"(index.y)
        : "l"(static_cast<const char*>(f.tables.indices.data) + at * (wide ? 8 : 4)),
          "r"(static_cast<int>(slot < ahead.query.slots && !wide)),
          "r"(static_cast<int>(slot < ahead.query.slots && wide)));
  };
  const auto index_read = [&] {
    return wide ? static_cast<int64_t>(static_cast<uint64_t>(index.y) << 32 |
                                       static_cast<uint32_t>(index.x))
                : int64_t{index.x};
  };
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
    slot = static_cast<int>(ahead.slot) + PackedCopier<kShared>::slot_of(warp, lane, rank);
    read_index();
  };
  // The rows of the pair after, on their way into the cache. In a cluster lanes repeat each other.
  const auto look_ahead = [&] {
    const bool own = !kShared || lane < 16;
    next = -1;
    if (slot < ahead.query.slots) {
      const KeyRow found = find_key(f.tables.rule, ahead.query, slot, index_read());
      if (ahead.counts && found.kind == SlotKind::foreign && own)
        cuda::count(f.tables, f.counters, ahead.b, ahead.s, ahead.g, slot);
      if (found.kind == SlotKind::valid)
        next = cuda::offset(f.kv, found.outer, found.inner, ahead.g);
    }
    slot += 2 * tile_keys;
    read_index();
    if (next < 0 || !own) return;
#pragma unroll
    for (int byte = 0; byte < packed_row_bytes; byte += 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(copier.bytes(next + byte)));
  };
  const auto begin = [&] {
    __syncwarp();
    copier.load(pieces[0], next, Unit(0, rank), 0);
  };
  const auto fill = [&](const PackedPieces& x, bool quick, const Unit& u, unsigned valid) {
    uint64_t* barrier = &beside.keys_ready[u.tile][u.half];
    const uint32_t ready = ptx::smem_address(barrier);
    if (u.begins) {
      ptx::barrier_wait(&beside.keys_free[u.tile][u.half], (pairs_done & 1) ^ 1);
      if (kShared && thread == 0) ptx::barrier_expect(barrier, bytes_of_half(u.tile, u.half));
    }
    const uint32_t tile = copier.first + u.tile * tiles.plan.keys * chunk_bytes;
    copier.put(x, quick, tile, u, ready);
    if (!u.ends) return;
    // With the half that is scored first: which slots are valid.
    if (u.half == u.tile && lane == 0) {
      const uint32_t bits =
          kShared ? (valid >> (8 * u.tile) & 0xff) << (8 * rank) : valid >> (16 * u.tile) & 0xffff;
      uint32_t* to = &beside.valid[u.tile][4 * rank + warp];
      *to = bits;
      if constexpr (kShared)
        ptx::store_word_async(copier.other + ptx::smem_address(to), bits, copier.other + ready);
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(barrier);
    if constexpr (kShared) {
      ptx::named_barrier_sync(1, producer_threads);
      if (warp == 0) copier.send(tile, u, lane, ready);
    }
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
      for (int n = 0; n < Unit::count; n += 2) {
        const bool last = n + 2 == Unit::count;
        unsigned quick = copier.quick_lanes(pieces[0]);
        copier.load(pieces[1], rows, Unit(n + 1, rank), quick);
        fill(pieces[0], quick == ~0u, Unit(n, rank), valid);
        quick = copier.quick_lanes(pieces[1]);
        copier.load(pieces[0], last ? next : rows, Unit(last ? 0 : n + 2, rank), quick);
        fill(pieces[1], quick == ~0u, Unit(n + 1, rank), valid);
      }
      ++pairs_done;
    }
  }
}

}  // namespace talea::sparse_attention::sm90
