// What: the kernel that sums values by weights that other blocks formed: a slice of the columns.
// Why: every sum is formed in the order in which one block alone forms it, so that the bits of a
// row do not depend on how many queries there are.
// Never: reads a key or an index.
#pragma once

#include "device/sm90/cluster.cuh"
#include "device/sm90/wgmma_narrow.cuh"
#include "ops/sparse_attention/sm90/consume.cuh"
#include "ops/sparse_attention/sm90/weigh.cuh"

namespace talea::sparse_attention::sm90 {

inline constexpr int value_threads = consumer_threads + 32;

template <bool kF16, int kGroup>
struct SliceSum : Consumer<slice_columns, kF16, kGroup, Rows::stored> {
  using Base = Consumer<slice_columns, kF16, kGroup, Rows::stored>;
  using Base::f, Base::o, Base::pending, Base::rows, Base::thread, Base::tiles;

  // Queues the products of a tile of a pair.
  __device__ void add(uint32_t pair, int tile) {
    const uint64_t p = ptx::operand_descriptor(tiles.weights(pair, tile));
    const uint64_t v = ptx::narrow_descriptor(tiles.values(pair, tile, kGroup));
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::multiply_narrow<kF16>(o[0], p + 2 * j, v + j * (512 >> 4));
  }
  __device__ void begin_products() {
    this->hold();
    ptx::warpgroup_arrive();
  }
  __device__ void finish_products() {
    ptx::warpgroup_commit();
    ptx::warpgroup_wait<0>();
    this->hold();
  }
  // To both blocks: each fills half of the weights of both.
  __device__ void release(uint32_t pair) {
    __syncwarp();
    if (thread % 32 < slice_cluster)
      ptx::barrier_arrive_at(tiles.empty(pair), static_cast<uint32_t>(thread % 32));
  }

  // A pair in which a reference moves, or the one after.
  __device__ void add_changed(uint32_t pair) {
    const float2 part = tiles.part(pair, kGroup, thread);
    const float2 own = tiles.reference(pair, kGroup, thread);
    const float2 others = tiles.reference(pair, 1 - kGroup, thread);
    float factor[2], before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float to = i ? own.y : own.x, other = i ? others.y : others.x;
      factor[i] = change_of(rows.reference[i], to);
      rows.sum[i] = __fmaf_rn(rows.sum[i], factor[i], i ? part.y : part.x);
      factor[i] *= pending[i];
      const Meeting m = meeting_of(to, other);
      before[i] = m.before;
      pending[i] = m.after;
      rows.reference[i] = to;
      if (to < other) {
        rows.reference[i] = other;
        rows.sum[i] *= m.before;
      }
    }
    this->multiply(factor);
    begin_products();
    add(pair, kGroup);
    finish_products();
    this->multiply(before);
    begin_products();
    add(pair, 1 - kGroup);
    finish_products();
  }

  // Its products are on their way when this returns.
  __device__ void add_unchanged(uint32_t pair) {
    const float2 part = tiles.part(pair, kGroup, thread);
    begin_products();
    add(pair, kGroup);
    add(pair, 1 - kGroup);
    ptx::warpgroup_commit();
    rows.sum[0] += part.x, rows.sum[1] += part.y;
  }

  __device__ bool sum(uint32_t pairs) {
    bool seen = false, changed = false;
#pragma unroll 1
    for (uint32_t pair = 0; pair < pairs; ++pair) {
      ptx::barrier_wait(tiles.full(pair), pair / stored_stages & 1);
      const uint32_t own = __shfl_sync(~0u, tiles.flags(pair, kGroup), 0);
      const uint32_t others = __shfl_sync(~0u, tiles.flags(pair, 1 - kGroup), 0);
      seen |= (own & flag_seen) != 0;
      const bool moved = ((own | others) & flag_moved) != 0;
      if (moved || changed) {
        ptx::warpgroup_wait<0>();
        this->hold();
        add_changed(pair);
      } else {
        add_unchanged(pair);
        ptx::warpgroup_wait<1>();
      }
      if (pair > 0 && pair - 1 + stored_stages < pairs) release(pair - 1);
      changed = moved;
    }
    ptx::warpgroup_wait<0>();
    this->hold();
    if (pairs > 0) {  // the last stage is not filled again
      const float2 top = tiles.top(pairs - 1, thread);
      rows.top[0] = top.x, rows.top[1] = top.y;
    }
    return seen;
  }

  __device__ void run(const Work& w, int pairs) {
    this->begin_rows();
    const bool seen = sum(pairs);
    this->finish(w, seen, pairs > 0);
  }
};

// One query, 64 of its heads at most, and a slice. A block loads its values, and for both blocks of
// a cluster half of the weights, once all of them are written.
__device__ inline void load_stored(const Forward& f, const StoredTiles& tiles, int64_t list,
                                   int64_t row_tile, uint32_t pairs) {
  static_assert(slice_cluster == 2 && weighed_bytes % 32 == 0);
  constexpr uint32_t half = weighed_bytes / 2;
  const uint32_t own = ptx::cluster_rank() * half;
  const char* weighed = f.stored.weighed + row_tile * f.segments * weighed_bytes + own;
  const char* values =
      f.stored.values + (list * f.stored.slices + tiles.slice) * f.stored.tiles * slice_bytes;
  if (!mutant(Mutant::few_values_do_not_wait))
    ptx::wait_for_count(f.stored.written + list, static_cast<int>(pairs) * f.stored.writers);
  for (uint32_t pair = 0; pair < pairs; ++pair) {
    uint64_t* full = tiles.full(pair);
    ptx::barrier_wait(tiles.empty(pair), (pair / stored_stages & 1) ^ 1);
    ptx::barrier_expect(full, stored_stage_bytes);
    ptx::load_bytes_multicast(weighed + int64_t{pair} * weighed_bytes, full,
                              tiles.stage(pair) + own, half, 3);
    ptx::load_bytes(values + int64_t{pair} * (2 * slice_bytes), full, tiles.values(pair, 0, 0),
                    2 * slice_bytes);
  }
}

template <bool kF16>
__global__ __launch_bounds__(value_threads,
                             1) void values_kernel(const __grid_constant__ Forward f) {
  extern __shared__ __align__(1024) char shared[];
  const int64_t row_tile = blockIdx.x / f.stored.slices;
  const StoredTiles tiles{shared, static_cast<int>(blockIdx.x % f.stored.slices), f.stored.half};
  StoredBeside& all = tiles.all();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stored_stages; ++i) {
      ptx::barrier_init(&all.full[i], 1);
      ptx::barrier_init(&all.empty[i], 8 * slice_cluster);  // warps
    }
    for (uint64_t& sums : all.beside.sums_ready) ptx::barrier_init(&sums, consumer_threads / 2);
    ptx::barrier_init_fence();
  }
  Work w;
  w.tile = static_cast<int>(row_tile % f.head_tiles);
  const int64_t list = row_tile / f.head_tiles;
  w.s = list % f.tables.queries;
  w.b = list / f.tables.queries;
  w.head = w.tile * tile_heads;
  w.heads = static_cast<int>(min(f.heads - w.head, int64_t{tile_heads}));
  const int pairs = pairs_of(cuda::query_rule(f.tables, w.b, w.s).slots);
  ptx::cluster_sync();
  if (group == 0)
    SliceSum<kF16, 0>{{f, tiles, all.beside, thread}}.run(w, pairs);
  else if (group == 1)
    SliceSum<kF16, 1>{{f, tiles, all.beside, thread}}.run(w, pairs);
  else if (thread == 0)
    load_stored(f, tiles, list, row_tile, static_cast<uint32_t>(pairs));
  __syncwarp();
  ptx::wait_for_earlier_kernels();  // whoever follows this one may take their memory
  ptx::cluster_sync();              // the other block writes into this one's memory until then
}

template <bool kF16>
void launch_values(const Forward& f, cudaStream_t stream) {
  ptx::launch_following(values_kernel<kF16>,
                        {.blocks = f.work / f.segments * f.stored.slices,
                         .threads = value_threads,
                         .shared_bytes = stored_shared_bytes(),
                         .cluster = slice_cluster},
                        f, stream, "sparse_attention: values");
}

}  // namespace talea::sparse_attention::sm90
