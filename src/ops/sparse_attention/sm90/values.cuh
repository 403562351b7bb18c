// What: the kernel that sums values by scores that other blocks formed: a slice of the columns.
// Why: every sum is formed in the order in which one block alone forms it, so that the bits of a
// row do not depend on how many queries there are.
// Never: reads a key or an index.
#pragma once

#include "device/common/cuda_check.hpp"
#include "ops/sparse_attention/sm90/consume.cuh"

namespace talea::sparse_attention::sm90 {

inline constexpr int value_threads = consumer_threads + 32;

// One query, 64 of its heads at most, and a slice.
__device__ inline void load_stored(const Forward& f, const StoredTiles& tiles, int64_t list,
                                   int head_tile, uint32_t pairs) {
  const char* scores = reinterpret_cast<const char*>(
      f.stored.scores + (list * f.head_tiles + head_tile) * f.stored.tiles * tile_scores);
  const char* values =
      f.stored.values + (list * f.stored.tiles * f.stored.slices + tiles.slice) * slice_bytes;
  for (uint32_t pair = 0; pair < pairs; ++pair) {
    uint64_t* full = tiles.full(pair);
    ptx::barrier_wait(tiles.empty(pair), (pair / stored_stages & 1) ^ 1);
    ptx::barrier_expect(full, static_cast<uint32_t>(stored_stage_bytes));
    ptx::load_bytes(scores + int64_t{pair} * (8 * tile_scores), full, tiles.scores(pair, 0),
                    8 * tile_scores);
    for (int t = 0; t < 2; ++t)
      ptx::load_bytes(values + (2 * int64_t{pair} + t) * f.stored.slices * slice_bytes, full,
                      tiles.values(pair, t, 0), slice_bytes);
  }
}

template <bool kF16, int kGroup>
__device__ void sum_stored(const Forward& f, const StoredTiles& tiles, const Work& w, int64_t list,
                           int pairs, int thread) {
  Consumer<slice_columns, kF16, kGroup, Rows::stored> c{f, tiles, tiles.all().beside, thread};
  bool seen = false;
  if (thread == 0)
    for (int pair = 0; pair < pairs; ++pair)
      seen |= f.stored.valid[list * f.stored.tiles + 2 * pair + kGroup] != 0;
  c.begin_rows();
  c.sum_pairs(pairs);
  c.finish(w, seen, pairs > 0);
}

template <bool kF16>
__global__ __launch_bounds__(value_threads,
                             1) void values_kernel(const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  const int64_t number = blockIdx.x / f.stored.slices;
  const StoredTiles tiles{shared, static_cast<int>(blockIdx.x % f.stored.slices), f.stored.half};
  StoredBeside& all = tiles.all();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stored_stages; ++i) {
      ptx::barrier_init(&all.full[i], 1);
      ptx::barrier_init(&all.empty[i], 16);  // eight warps, two tiles
    }
    for (int t = 0; t < 2; ++t) {
      all.beside.moved[t][0] = all.beside.moved[t][1] = 0;
      ptx::barrier_init(&all.beside.sums_ready[t], consumer_threads / 2);
      ptx::barrier_init(&all.beside.weights_ready[t], consumer_threads / 2);
    }
    ptx::barrier_init_fence();
  }
  Work w;
  w.tile = static_cast<int>(number % f.head_tiles);
  const int64_t list = number / f.head_tiles;
  w.s = list % f.tables.queries;
  w.b = list / f.tables.queries;
  w.head = w.tile * tile_heads;
  w.heads = static_cast<int>(min(f.heads - w.head, int64_t{tile_heads}));
  const int pairs = pairs_of(cuda::query_rule(f.tables, w.b, w.s).slots);
  __syncthreads();
  if (group == 0)
    sum_stored<kF16, 0>(f, tiles, w, list, pairs, thread);
  else if (group == 1)
    sum_stored<kF16, 1>(f, tiles, w, list, pairs, thread);
  else if (thread == 0)
    load_stored(f, tiles, list, w.tile, static_cast<uint32_t>(pairs));
}

template <bool kF16>
void launch_values(const Forward& f, cudaStream_t stream) {
  auto* kernel = values_kernel<kF16>;
  const auto bytes = static_cast<size_t>(stored_shared_bytes());
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of values");
  const int64_t blocks = f.work / f.segments * f.stored.slices;
  kernel<<<static_cast<unsigned>(blocks), value_threads, bytes, stream>>>(f);
  device::check_launch("sparse_attention: values");
}

}  // namespace talea::sparse_attention::sm90
