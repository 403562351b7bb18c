// What: what the two warpgroups of the backward pass that multiply have in common: dq, their way
// through works and tiles.
// Why: each sums its own columns of dq, of the same P and dS.
// Never: waits for keys it has not released in the order that they are filled.
#pragma once

#include "device/sm90/wgmma.cuh"
#include "ops/sparse_attention/sm90/arrive.cuh"
#include "ops/sparse_attention/sm90/backward_give.cuh"
#include "ops/sparse_attention/sm90/backward_work.cuh"
#include "ops/sparse_attention/sm90/store.cuh"

namespace talea::sparse_attention::sm90 {

namespace ptx = talea::sm90;

// Named barriers of the two warpgroups.
enum BackwardBarrier : int { weights_written = 1, keys_measured, weights_whole };

// How many of the first chunks of dkv warpgroup 0 adds up, of a block that adds up all (kAdds).
constexpr int lent_chunks(bool adds, int all) { return adds && all > 5 ? 2 : 0; }

template <int kFirst, int kSecond, bool kF16, bool kAdds, int kGroup>
struct BackwardConsumer {
  static constexpr int own = kGroup == 0 ? kFirst : kSecond;
  static constexpr int begin = kGroup == 0 ? 0 : kFirst;  // the first of its chunks
  static constexpr uint64_t chunk = chunk_bytes >> 4, step = 2048 >> 4;

  const Backward& p;
  const BackwardTiles<kFirst, kSecond> tiles;
  BackwardBeside& beside;
  const int thread;  // of the warpgroup
  uint32_t works = 0, tiles_done = 0;
  float dq[own][32];

  __device__ int row() const { return thread / 32 * 16 + thread % 32 / 4; }

  __device__ void wait_keys(int part) const {
    ptx::barrier_wait(&beside.keys_ready[part], tiles_done & 1);
    ptx::fence_async_shared();
  }
  __device__ void release_keys(int third) const {
    arrive_warp(&beside.keys_free[part_number<kAdds>(kGroup, third)]);
  }
  __device__ void release_all_keys() const {
#pragma unroll
    for (int third = 0; third < thirds; ++third) release_keys(third);
  }

  // Begins dq += dS K of this warpgroup's columns, in three groups of products. ds: warpgroup 0's,
  // in registers; null: from shared memory.
  __device__ void begin_dq(const uint32_t* ds) {
    const uint64_t slopes = ptx::operand_descriptor(tiles.slopes());
#pragma unroll
    for (int i = 0; i < own; ++i) ptx::hold_registers(dq[i]);
    ptx::warpgroup_arrive();
#pragma unroll
    for (int third = 0; third < thirds; ++third) {
      constexpr int from = begin;
      const Part part = third_of<kFirst, kSecond>(kGroup, third);
#pragma unroll
      for (int i = 0; i < own; ++i) {
        if (i + from < part.first || i + from >= part.last) continue;
        const uint64_t k = ptx::operand_descriptor(tiles.keys() + (from + i) * chunk_bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if constexpr (kGroup == 0) {
            const uint32_t left[4] = {ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]};
            ptx::multiply_registers<64, 1, kF16>(dq[i], left, k + j * step);
          } else {
            ptx::wgmma_n64<0, 1, kF16>(dq[i], slopes + 2 * j, k + j * step);
          }
      }
      ptx::warpgroup_commit();
    }
  }
  // What of the keys it read is released as it is read. kLater: groups of products begun since.
  template <int kLater>
  __device__ void end_dq() {
    ptx::warpgroup_wait<kLater + 2>();
    release_keys(0);
    ptx::warpgroup_wait<kLater + 1>();
    release_keys(1);
    ptx::warpgroup_wait<kLater>();
    release_keys(2);
#pragma unroll
    for (int i = 0; i < own; ++i) ptx::hold_registers(dq[i]);
  }

  // Begins dkv of a chunk of columns: dS^T q, and of values + P^T d_o.
  __device__ void begin_dkv(float (&x)[32], int c) const {
    const uint64_t ds = ptx::operand_descriptor(tiles.slopes());
    const uint64_t weights = ptx::operand_descriptor(tiles.weights());
    const uint64_t q = ptx::operand_descriptor(tiles.queries()) + c * chunk;
    ptx::warpgroup_arrive();
    ptx::wgmma_first_n64<1, 1, kF16>(x, ds, q);
#pragma unroll
    for (int j = 1; j < 4; ++j) ptx::wgmma_n64<1, 1, kF16>(x, ds + j * step, q + j * step);
    if (c < tiles.values) {
      const uint64_t d_o = ptx::operand_descriptor(tiles.upstream()) + c * chunk;
#pragma unroll
      for (int j = 0; j < 4; ++j) ptx::wgmma_n64<1, 1, kF16>(x, weights + j * step, d_o + j * step);
    }
    ptx::warpgroup_commit();
  }
  // Where this thread adds up dkv, from chunk c on.
  __device__ Lines lines_of(int c) const {
    return Lines(static_cast<float*>(p.sums.data) + c * chunk_columns, beside.rows[tiles_done % 2],
                 thread);
  }
  __device__ void add_dkv(Lines& lines, const float (&x)[32], int c) const {
    give<false, kF16>(lines, x, p.grown, static_cast<int>(p.f.dim) - c * chunk_columns);
    lines.move(chunk_columns);
  }

  __device__ void store_dq(const Work& w) {
    const View& to = p.dq;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int first = (begin + i) * chunk_columns;
      Where at[2];
      for (int e = 0; e < 2; ++e) {
        const int r = row() + 8 * e;
        if (r >= w.heads) continue;
        at[e].begin = cuda::offset(to, w.b, w.s, w.head + r) + first;
        at[e].left = static_cast<int>(p.f.dim) - first;
      }
#pragma unroll
      for (int k = 0; k < 32; ++k) dq[i][k] *= p.grown;
      store_rows<64, kF16>(to, p.dq_words, dq[i], at);
    }
  }

  // Role: begin_work(w), measure(w, tiles), one_tile(work's number, tile).
  template <typename Role>
  __device__ void run(Role& role) {
    const int64_t end = p.last_list * p.f.head_tiles;
    for (int64_t number = p.first_list * p.f.head_tiles + blockIdx.x; number < end;
         number += gridDim.x, ++works) {
      const Work w = work_of(p.f, number);
      role.begin_work(w);
      ptx::barrier_wait(&beside.q_ready, works & 1);
      ptx::fence_async_shared();
      const int count = __shfl_sync(~0u, *const_cast<volatile int*>(&beside.tiles), 0);
      if (__shfl_sync(~0u, *const_cast<volatile int*>(&beside.far), 0)) role.measure(w, count);
#pragma unroll
      for (int i = 0; i < own; ++i)
#pragma unroll
        for (int k = 0; k < 32; ++k) dq[i][k] = 0;
      for (int tile = 0; tile < count; ++tile, ++tiles_done) role.one_tile(number, tile);
      arrive_warp(&beside.q_free);
      if (p.dq.present) {
#pragma unroll
        for (int i = 0; i < own; ++i) ptx::hold_registers(dq[i]);
        store_dq(w);
      }
    }
  }
};

}  // namespace talea::sparse_attention::sm90
