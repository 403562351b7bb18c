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

// A pair of tiles is filled in ten steps: of four rows a thread, 16 bytes of 128 columns, or 16
// bytes of the 64 columns that are bf16 already. The order is that of produce.cuh.
struct PackedStep {
  int tile, columns;  // of the pair; which 128 of them, 4: the last 64
  bool begins, ends;  // a half of a tile
};
constexpr int packed_steps = 10;
constexpr PackedStep packed_step(int i) {
  constexpr PackedStep steps[packed_steps] = {
      {0, 0, true, false}, {0, 1, false, true},                        // half 0 of tile 0
      {1, 2, true, false}, {1, 3, false, false}, {1, 4, false, true},  // half 1 of tile 1
      {0, 2, true, false}, {0, 3, false, false}, {0, 4, false, true},  // half 1 of tile 0
      {1, 0, true, false}, {1, 1, false, true}};                       // half 0 of tile 1
  return steps[i];
}

__device__ inline uint32_t bf16_of(uint32_t e4m3x2, float scale) {
  uint32_t halves, out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(e4m3x2)));
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(x.y * scale), "f"(x.x * scale));
  return out;
}

// What a thread has read of four rows, not yet in shared memory.
struct PackedRead {
  uint4 words[4];
  float scale[4];
};

struct PackedCopier {
  const char* kv;
  uint32_t tiles[2];  // addresses
  int thread;

  // rows: of slot_of_lane's slot, in bytes; -1: absent.
  __device__ void read(const PackedStep& step, int64_t rows, PackedRead& to) const {
    const int piece = thread % 8, lane = thread % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t at = __shfl_sync(~0u, rows, step.tile * 16 + j * 4 + lane / 8);
      to.words[j] = make_uint4(0, 0, 0, 0);
      to.scale[j] = 0;
      if (at < 0) continue;
      const char* row = kv + at;
      const int64_t first = step.columns < 4 ? step.columns * packed_tile : packed_rest_at;
      to.words[j] = __ldg(reinterpret_cast<const uint4*>(row + first + piece * 16));
      if (step.columns < 4)
        to.scale[j] = __ldg(reinterpret_cast<const float*>(row + packed_scales_at) + step.columns);
    }
  }
  __device__ static void put(uint32_t row, int r, int piece, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(row + ((piece ^ (r % 8)) * 16)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  __device__ void write(const PackedStep& step, const PackedRead& from) const {
    const int piece = thread % 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = thread / 8 + 16 * j;
      const uint4& w = from.words[j];
      const uint32_t row = tiles[step.tile] + r * 128;
      if (step.columns == 4) {
        put(row + 8 * chunk_bytes, r, piece, w);
        continue;
      }
      const float scale = from.scale[j];
      const uint4 low = {bf16_of(w.x, scale), bf16_of(w.x >> 16, scale), bf16_of(w.y, scale),
                         bf16_of(w.y >> 16, scale)};
      const uint4 high = {bf16_of(w.z, scale), bf16_of(w.z >> 16, scale), bf16_of(w.w, scale),
                          bf16_of(w.w >> 16, scale)};
      const uint32_t chunk = row + (2 * step.columns + piece / 4) * chunk_bytes;
      const int first = piece % 4 * 2;
      const bool odd = piece >= 4;  // lanes of one row hit other banks
      put(chunk, r, first + odd, odd ? high : low);
      put(chunk, r, first + !odd, odd ? low : high);
    }
  }
};

template <int kHalf>
__device__ void produce_packed(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  namespace ptx = talea::sm90;
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
    // The row after, on its way into the cache.
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
    look_ahead();
    PackedRead read[2];
    copier.read(packed_step(0), next, read[0]);
    for (int pair = 0; pair < pairs; ++pair) {
      const int64_t rows = next;
      const unsigned valid = __ballot_sync(~0u, rows >= 0);
      const uint32_t phase = (pairs_done & 1) ^ 1;
      if (pair + 1 < pairs) look_ahead();
#pragma unroll
      for (int i = 0; i < packed_steps; ++i) {
        const PackedStep step = packed_step(i);
        if (i + 1 < packed_steps)
          copier.read(packed_step(i + 1), rows, read[(i + 1) % 2]);
        else if (pair + 1 < pairs)
          copier.read(packed_step(0), next, read[0]);
        const int half = step.columns < 2 ? 0 : 1, t = step.tile;
        if (step.begins) ptx::barrier_wait(&beside.keys_free[t][half], phase);
        copier.write(step, read[i % 2]);
        if (!step.ends) continue;
        ptx::fence_async_shared();
        if (half == t && lane == 0) {  // with the first half: which slots are valid
          reinterpret_cast<uint16_t*>(&beside.valid[t])[warp] =
              static_cast<uint16_t>(valid >> (16 * t));
          ptx::barrier_arrive(&beside.keys_ready[t][half]);
        }
        ptx::barrier_arrive(&beside.keys_ready[t][half]);
        if (pair == 0 && i == 1) fetch_queries();
      }
      ++pairs_done;
    }
  }
}

}  // namespace talea::sparse_attention::sm90
