// What: the kernel that sums dkv over the heads of a query: dS^T q, and of values + P^T d_o.
// Why: all heads of a query are summed on chip, so that a slot's row leaves it once.
// Never: reads kv, or a tensor row that no valid slot names.
//
// A block holds q and d_o of one list for a group of columns; P and dS of a tile of keys pass by in
// a few stages. The two warpgroups that multiply take a tile each: one reads the columns of P and
// dS as left factors into registers, and forms dkv a chunk of 64 columns at a time.
#pragma once

#include "device/common/cuda_check.hpp"
#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/sm90/arrive.cuh"
#include "ops/sparse_attention/sm90/backward_give.cuh"
#include "ops/sparse_attention/sm90/backward_produce.cuh"

namespace talea::sparse_attention::sm90 {

namespace ptx = talea::sm90;

// One list, some of its tiles of heads, a group of chunks of columns.
struct SumWork {
  int64_t list = 0;
  int part = 0, group = 0;
};

template <int kTiles>
struct SumTiles {
  char* base;
  SumPlan plan;
  __device__ char* queries(int tile, int c) const {
    return base + (tile * plan.chunks + c) * chunk_bytes;
  }
  __device__ char* upstream(int tile, int c) const {
    return queries(kTiles, 0) + (tile * plan.chunks + c) * chunk_bytes;
  }
  __device__ char* stage(int i) const { return upstream(kTiles, 0) + i * kTiles * weights_bytes; }
  __device__ SumBeside& beside() const { return *reinterpret_cast<SumBeside*>(stage(plan.stages)); }
  __device__ SumWork work(const Backward& p, int64_t number) const {
    SumWork w;
    // A block's turns alternate between groups, which may differ by a chunk.
    const int64_t turn = gridDim.x % plan.groups == 0 ? number / gridDim.x : 0;
    w.group = static_cast<int>((number + turn) % plan.groups);
    w.part = static_cast<int>(number / plan.groups % plan.sums);
    w.list = p.first_list + number / plan.groups / plan.sums;
    return w;
  }
  __device__ int64_t works(const Backward& p) const {
    return (p.last_list - p.first_list) * plan.sums * plan.groups;
  }
};

template <int kTiles>
__device__ void produce_sums(const Backward& p, const SumTiles<kTiles>& tiles, SumBeside& beside,
                             int thread) {
  const Forward& f = p.f;
  const int warp = thread / 32, lane = thread % 32;
  const SumPlan& plan = tiles.plan;
  uint32_t works = 0, done = 0;
  for (int64_t number = blockIdx.x; number < tiles.works(p); number += gridDim.x, ++works) {
    const SumWork sum = tiles.work(p, number);
    const int first = sum.group * plan.chunks;
    ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
    for (int tile = 0; tile < kTiles; ++tile) {
      const Work w = work_of(f, sum.list * f.head_tiles + sum.part * kTiles + tile);
      for (const bool upstream : {false, true}) {
        const View& from = upstream ? p.d_o : f.q;
        const uint32_t to =
            ptx::smem_address(upstream ? tiles.upstream(tile, 0) : tiles.queries(tile, 0));
        copy_heads<most_columns / chunk_columns>(from, w, upstream ? f.value_dim : f.dim, to, first,
                                                 plan.chunks, thread, f.q);
      }
    }
    ptx::barrier_arrive_after_copies(&beside.q_ready);
    if (thread == 0) {
      const Work w = work_of(f, sum.list * f.head_tiles);
      beside.query = cuda::query_rule(f.tables, w.b, w.s);
      beside.tiles = tiles_of(beside.query.slots);
    }
    ptx::named_barrier_sync(1, producer_threads);
    if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
    const int count = beside.tiles;
    if (warp < 2)
      for (int tile = 0; tile < count; ++tile, ++done) {
        const int at = done % plan.stages, slot = tile * tile_keys + thread;
        const KeyRow found = find_slot(f, beside.query, sum.list, slot, false);
        int64_t row = -1;
        if (found.kind == SlotKind::valid)
          row =
              (((sum.list - p.first_list) * plan.sums + sum.part) * f.tables.slots + slot) * f.dim;
        ptx::barrier_wait(&beside.free[at], (done / plan.stages & 1) ^ 1);
        beside.rows[at][thread] = row;
        __syncwarp();
        if (lane != 0) continue;
        if (warp == 1) {
          ptx::barrier_arrive(&beside.ready[at]);
          continue;
        }
        ptx::barrier_expect(&beside.ready[at], kTiles * weights_bytes);
        for (int i = 0; i < kTiles; ++i) {
          const int64_t work = sum.list * f.head_tiles + sum.part * kTiles + i;
          ptx::load_bytes(p.weights + weights_at(p, work, tile), &beside.ready[at],
                          tiles.stage(at) + i * weights_bytes, weights_bytes);
        }
      }
    // Nobody reads what thread 0 writes for the next list before all have seen this one's.
    ptx::named_barrier_sync(1, producer_threads);
  }
}

template <int kTiles, bool kF16>
struct SumConsumer {
  static constexpr uint64_t step = 2048 >> 4;
  const Backward& p;
  const SumTiles<kTiles> tiles;
  SumBeside& beside;
  const int group, thread;

  // The columns of 64 x 64 weights as a left factor: 16 keys of a warp, 64 heads.
  __device__ void load_left(uint32_t (&x)[4][4], const char* tile) const {
    const int lane = thread % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int line = 16 * j + lane / 16 * 8 + lane % 8, piece = thread / 32 * 2 + lane / 8 % 2;
      ptx::load_matrix_x4_transposed(x[j], tile + line * 128 + ((piece ^ (line % 8)) * 16));
    }
  }

  // Begins the products of a chunk. Columns of d_o that are no values are zeros.
  __device__ void form(float (&x)[32], const uint32_t (&ds)[kTiles][4][4],
                       const uint32_t (&weights)[kTiles][4][4], int c) const {
#pragma unroll
    for (float& each : x) each = 0;
    ptx::hold_registers(x);
    ptx::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint64_t q = ptx::operand_descriptor(tiles.queries(i, c));
      const uint64_t d_o = ptx::operand_descriptor(tiles.upstream(i, c));
#pragma unroll
      for (int j = 0; j < 4; ++j) ptx::multiply_registers<64, 1, kF16>(x, ds[i][j], q + j * step);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        ptx::multiply_registers<64, 1, kF16>(x, weights[i][j], d_o + j * step);
    }
    ptx::warpgroup_commit();
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(x);
  }

  __device__ void one_tile(const SumWork& w, uint32_t done) const {
    const int at = static_cast<int>(done % tiles.plan.stages);
    uint32_t ds[kTiles][4][4], weights[kTiles][4][4];
    ptx::barrier_wait(&beside.ready[at], done / tiles.plan.stages & 1);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_left(weights[i], tiles.stage(at) + i * weights_bytes);
      load_left(ds[i], tiles.stage(at) + i * weights_bytes + chunk_bytes);
    }
    const int first = w.group * tiles.plan.chunks;
    Lines lines(p.contributions + first * chunk_columns, beside.rows[at], thread);
    arrive_warp(&beside.free[at]);
    const int chunks = min(chunks_of_columns(p.f.dim) - first, tiles.plan.chunks);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      float x[32];
      form(x, ds, weights, c);
      give<true, kF16>(lines, x, p.grown, static_cast<int>(p.f.dim) - (first + c) * chunk_columns);
      lines.move(chunk_columns);
    }
  }

  __device__ void run() const {
    uint32_t works = 0, done = 0;
    for (int64_t number = blockIdx.x; number < tiles.works(p); number += gridDim.x, ++works) {
      const SumWork w = tiles.work(p, number);
      ptx::barrier_wait(&beside.q_ready, works & 1);
      ptx::fence_async_shared();
      const int count = __shfl_sync(~0u, *const_cast<volatile int*>(&beside.tiles), 0);
      for (int tile = 0; tile < count; ++tile, ++done)
        if (done % sum_groups == static_cast<uint32_t>(group)) one_tile(w, done);
      arrive_warp(&beside.q_free);
    }
  }
};

template <int kTiles, bool kF16>
__global__ __launch_bounds__(threads, 1) void sums_kernel(const __grid_constant__ Backward p,
                                                          const SumPlan plan) {
  extern __shared__ __align__(1024) char shared[];
  const SumTiles<kTiles> tiles{shared, plan};
  SumBeside& beside = tiles.beside();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&beside.q_ready, producer_threads + 1);
    ptx::barrier_init(&beside.q_free, 4 * sum_groups);
    for (int i = 0; i < plan.stages; ++i) {
      ptx::barrier_init(&beside.ready[i], 2);
      ptx::barrier_init(&beside.free[i], 4);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (group < sum_groups) {
    ptx::raise_registers<216>();
    SumConsumer<kTiles, kF16>{p, tiles, beside, group, thread}.run();
  } else {
    ptx::lower_registers<72>();
    produce_sums<kTiles>(p, tiles, beside, thread);
  }
}

template <int kTiles, bool kF16>
void launch_sums_of(const Backward& p, const SumPlan& plan, unsigned blocks, cudaStream_t stream) {
  auto* kernel = sums_kernel<kTiles, kF16>;
  const auto bytes = static_cast<size_t>(sum_shared_bytes(plan));
  device::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)),
                "sparse_attention: shared memory of dkv");
  kernel<<<blocks, threads, bytes, stream>>>(p, plan);
  device::check_launch("sparse_attention: dkv");
}

template <bool kF16>
void launch_sums(const Backward& p, unsigned blocks, cudaStream_t stream) {
  const SumPlan plan = sum_plan(p.f.dim, p.f.head_tiles);
  if (plan.head_tiles == 2) return launch_sums_of<2, kF16>(p, plan, blocks, stream);
  launch_sums_of<1, kF16>(p, plan, blocks, stream);
}

}  // namespace talea::sparse_attention::sm90
