// What: the products of narrow.cuh, pair of tiles by pair, and when each next tile is copied.
// Why: the first tile of the next pair comes behind the scores of the second, the second behind the
// scores of the next pair's first: copies are under way while products are.
// Never: copies over a tile before all warps have waited for the products that read it.
#pragma once

#include "ops/sparse_attention/mutants.hpp"
#include "ops/sparse_attention/sm90/narrow_gather.cuh"
#include "ops/sparse_attention/sm90/narrow_rows.cuh"

namespace talea::sparse_attention::sm90 {

template <class S>
struct NarrowSums : NarrowRows<S> {
  using NarrowRows<S>::o;
  using NarrowRows<S>::hold;
  static constexpr uint64_t q_chunk = S::plan.q_bytes >> 4, step = 2048 >> 4;

  NarrowGather<S>& gather;

  // Queues the products of the scores of tile kTile, chunks in the order of consume.cuh.
  template <int kTile>
  __device__ void begin_scores(float (&s)[32], int pair) {
    // Of up to 32 heads, rows of eight heads lie 512 bytes apart for the descriptor: each second
    // eight rows of a product are nobody's, whatever they read.
    uint64_t q = S::operand(0);
    if (S::rows == 1) q = (q & ~(uint64_t{0x3fff} << 32)) | uint64_t{512 >> 4} << 32;
    ptx::barrier_wait(&S::beside().keys_ready[kTile], pair & 1);
    ptx::fence_async_shared();
    ptx::warpgroup_arrive();
#pragma unroll
    for (int n = 0; n < S::columns; ++n) {
      const int c = (n + kTile) % S::columns;
      const uint64_t k = S::operand(S::template chunk_at<kTile>(c, pair));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (c + 1 == S::columns && i >= S::steps) continue;  // columns of zeros
        if (n + i == 0)
          ptx::wgmma_first_n64<0, 0, S::f16>(s, q + c * q_chunk, k);
        else
          ptx::wgmma_n64<0, 0, S::f16>(s, q + c * q_chunk + 2 * i, k + 2 * i);
      }
    }
    ptx::warpgroup_commit();
  }
  // Waits for all products.
  __device__ void end_products(float (&s)[32]) {
    ptx::warpgroup_wait<0>();
    ptx::hold_registers(s);
    hold();
  }
  __device__ void begin_products() {
    hold();
    ptx::warpgroup_arrive();
  }
  // Queues the products of weights and a half of a tile's values.
  template <int kTile>
  __device__ void add(int h, const uint32_t (&p)[16], int pair) {
    const uint64_t v = S::operand(S::template chunk_at<kTile>(h, pair));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t a[4] = {p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]};
      ptx::multiply_registers<S::half, 1, S::f16>(o[h], a, v + j * step);
    }
  }

  // Whether a slot was valid.
  __device__ bool sum_pairs(int pairs) {
    bool seen = false;
    if (pairs <= 0) return seen;
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      float s[32];
      uint32_t p[2][16];
      float to[2][2], part[2];
      begin_scores<0>(s, pair);
      if (S::early && pair > 0) {
        ptx::warpgroup_wait<1>();
        __syncthreads();  // all have read the second tile
        gather.template copy<1>(pair);
      }
      end_products(s);
      seen |= this->template weigh_tile<0>(s, gather.f.scale, p[0], to[0], part);
      this->own_tile_first(0, to[0], part);
      const bool more = S::early && pair + 1 < pairs;
      if (more && mutant(Mutant::narrow_filled_early)) {
        gather.next();
        gather.template copy<0>(pair + 1);
        __nanosleep(20000);  // without it the products may win the race
      }
      begin_products();
      add<0>(0, p[0], pair);
      ptx::warpgroup_commit();
      begin_scores<1>(s, pair);
      if (more && !mutant(Mutant::narrow_filled_early)) {
        gather.next();
        ptx::warpgroup_wait<1>();
        __syncthreads();  // all have read the first tile, but for values of its second chunk
        gather.template copy<0>(pair + 1);
      }
      end_products(s);
      seen |= this->template weigh_tile<1>(s, gather.f.scale, p[1], to[1], part);
      this->own_tile_first(1, to[1], part);
      this->others_tile_next(0, to[0], to[1], false);
      begin_products();
      add<1>(0, p[1], pair);
      if constexpr (S::wide) add<1>(1, p[1], pair);
      ptx::warpgroup_commit();
      if (S::wide && S::rows == 1) {  // the compiler has registers for no more products at a time
        ptx::warpgroup_wait<0>();
        hold();
      }
      this->others_tile_next(1, to[1], to[0], S::wide && S::rows == 2);
      if constexpr (S::wide) {
        begin_products();
        add<0>(1, p[0], pair);
        ptx::warpgroup_commit();
      }
      this->meet(to);
      if constexpr (!S::early) {
        if (pair + 1 == pairs) break;
        gather.next();
        ptx::warpgroup_wait<0>();
        hold();
        __syncthreads();  // all have read the tiles
        gather.template copy<0>(pair + 1);
        gather.template copy<1>(pair + 1);
      }
    }
    ptx::warpgroup_wait<0>();
    hold();
    return seen;
  }
};

}  // namespace talea::sparse_attention::sm90
