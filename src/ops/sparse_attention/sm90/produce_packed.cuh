// What: the warpgroup of lane sm90 that fills tiles from packed FP8 rows: 656 bytes become 576
// columns of bf16 in shared memory.
// Why: a dequantised copy would be read and written once more than the rows themselves.
// Never: takes a scale through fewer bits than it has: x = e4m3 * scale in fp32, rounded once.
#pragma once

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
__device__ inline uint4 bf16_of(const uint2& e4m3x8, float scale) {
  return make_uint4(bf16_of(e4m3x8.x, scale), bf16_of(e4m3x8.x >> 16, scale),
                    bf16_of(e4m3x8.y, scale), bf16_of(e4m3x8.y >> 16, scale));
}

// A pair of tiles is filled in four parts, halves of their columns, in the order of produce.cuh.
// Half 0 is 256 columns of e4m3; half 1 as many, and the 64 that are bf16 already.
struct PackedPart {
  int tile, half;
};
constexpr int packed_parts = 4;
constexpr PackedPart packed_part(int i) {
  constexpr PackedPart parts[packed_parts] = {{0, 0}, {1, 1}, {0, 1}, {1, 0}};
  return parts[i];
}

// The two scales of a half, of a thread's four rows.
struct PackedScales {
  float2 of[4];
};

// The 128 bytes of a row's 128 columns first lie where its later 64 will, in the row's line of
// their chunk; the eight lanes of a row read them all before one of them writes.
struct PackedCopier {
  const char* kv;
  uint32_t tiles[2];  // addresses
  int thread;

  __device__ uint32_t line(int tile, int chunk, int j) const {
    return tiles[tile] + chunk * chunk_bytes + (thread / 8 + 16 * j) * 128;
  }
  // rows: of slot_of_lane's slot, in bytes; -1: absent.
  __device__ void begin(const PackedPart& part, int64_t rows, PackedScales& scales) const {
    namespace ptx = talea::sm90;
    const int piece = thread % 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at =
          __shfl_sync(~0u, rows, part.tile * 16 + j * 4 + static_cast<int>(threadIdx.x) % 32 / 8);
      const bool there = at >= 0;
      const char* row = kv + (there ? at : 0);
#pragma unroll
      for (int t = 2 * part.half; t < 2 * part.half + 2; ++t)
        ptx::copy_16_bytes(line(part.tile, 2 * t + 1, j) + piece * 16,
                           row + t * packed_tile + piece * 16, there);
      if (part.half == 1)
        ptx::copy_16_bytes(line(part.tile, 8, j) + (piece ^ (thread / 8 % 8)) * 16,
                           row + packed_rest_at + piece * 16, there);
      const auto* scale = reinterpret_cast<const float2*>(row + packed_scales_at);
      scales.of[j] = there ? __ldg(scale + part.half) : make_float2(0, 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ static void put(uint32_t line, int place, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(line + place * 16), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  // The copies of the part have arrived.
  __device__ void end(const PackedPart& part, const PackedScales& scales) const {
    const int piece = thread % 8, turn = thread / 8 % 8;
    const bool odd = piece >= 4;  // lanes of one row hit other banks
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int t = 2 * part.half + k;
      uint4 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[j].x), "=r"(words[j].y), "=r"(words[j].z), "=r"(words[j].w)
                     : "r"(line(part.tile, 2 * t + 1, j) + piece * 16)
                     : "memory");
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4& w = words[j];
        const float scale = k == 0 ? scales.of[j].x : scales.of[j].y;
        const uint2 first = odd ? make_uint2(w.z, w.w) : make_uint2(w.x, w.y);
        const uint2 second = odd ? make_uint2(w.x, w.y) : make_uint2(w.z, w.w);
        const uint32_t to = line(part.tile, 2 * t, j) + (piece >= 4 ? chunk_bytes : 0);
        put(to, (piece % 4 * 2 + odd) ^ turn, bf16_of(first, scale));
        put(to, (piece % 4 * 2 + !odd) ^ turn, bf16_of(second, scale));
      }
    }
  }
};

// While a part is on its way, the one before it is dequantised. A part waits for no more than what
// the consumers release without the one before it.
template <int kHalf>
__device__ void produce_packed(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  namespace ptx = talea::sm90;
  static_assert(kHalf == 256 && parts_of_half(kHalf) == 1);
  const int warp = thread / 32, lane = thread % 32;
  const Copier queries(thread, f.dim);
  const uint32_t shared = ptx::smem_address(tiles.base);
  const PackedCopier copier = {static_cast<const char*>(f.kv.data),
                               {shared + tiles.keys_at(0), shared + tiles.keys_at(1)},
                               thread};
  uint32_t works = 0, pairs_done = 0;
  for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
    const Work w = work_of(f, number);
    const List list = {cuda::query_rule(f.tables, w.b, w.s),
                       cuda::offset(f.tables.indices, w.b, w.s, w.g), f.tables.indices.stride[3],
                       f.counters && w.tile == 0};
    const int pairs = w.heads > 0 || list.counts ? pairs_of(list.query.slots) : 0;
    int64_t slot = slot_of_lane(warp, lane), next = -1;
    // The rows of the pair after, on their way into the cache.
    const auto look_ahead = [&] {
      next = row_of_slot(f, w, list, slot, index_of_slot(f, list, slot));
      slot += 2 * tile_keys;
      if (next < 0) return;
#pragma unroll
      for (int byte = 0; byte < packed_row_bytes; byte += 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(copier.kv + next + byte));
    };
    const auto fetch_queries = [&] {
      ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
      if (thread == 0) beside.pairs = pairs;
      copy_queries(f, w, queries, shared, tiles.plan.columns, thread);
      ptx::barrier_arrive_after_copies(&beside.q_ready);
      if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
    };
    if (pairs == 0) {
      fetch_queries();
      continue;
    }
    PackedScales scales[2];
    unsigned valid = 0;
    const auto finish = [&](int i) {
      const PackedPart part = packed_part(i);
      copier.end(part, scales[i % 2]);
      ptx::fence_async_shared();
      uint64_t* ready = &beside.keys_ready[part.tile][part.half];
      if (part.half == part.tile && lane == 0) {  // with the first half: which slots are valid
        reinterpret_cast<uint16_t*>(&beside.valid[part.tile])[warp] =
            static_cast<uint16_t>(valid >> (16 * part.tile));
        ptx::barrier_arrive(ready);
      }
      ptx::barrier_arrive(ready);
    };
    look_ahead();
    for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
      const int64_t rows = next;
      if (pair + 1 < pairs) look_ahead();
#pragma unroll
      for (int i = 0; i < packed_parts; ++i) {
        const PackedPart part = packed_part(i);
        ptx::barrier_wait(&beside.keys_free[part.tile][part.half], (pairs_done & 1) ^ 1);
        copier.begin(part, rows, scales[i % 2]);
        if (pair == 0 && i == 0) {
          fetch_queries();
        } else {
          asm volatile("cp.async.wait_group 1;" ::: "memory");
          finish((i + packed_parts - 1) % packed_parts);
        }
        if (i == 0) valid = __ballot_sync(~0u, rows >= 0);
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    finish(packed_parts - 1);
  }
}

}  // namespace talea::sparse_attention::sm90
