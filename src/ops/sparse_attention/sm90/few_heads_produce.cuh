// What: the ring of keys of few_heads.cuh in shared memory, and the warpgroup that fills it.
// Why: up to 16 heads of q leave room for more than a pair of tiles: copies never wait for a whole
// tile to be read.
// Never: reads a row that no valid slot names.
#pragma once

#include "ops/sparse_attention/sm90/produce.cuh"

namespace talea::sparse_attention::sm90 {

// Pairs of tiles are numbered through all works of a block.
struct Ring {
  char* base;
  // Which of the ring's chunks is one of a pair: 18 a pair, of 24.
  __device__ static uint32_t chunk_at(uint32_t pair, int chunk) {
    static_assert(pair_chunks % 24 == 18 && ring_chunks == 24);
    const uint32_t at = ((0 - pair) & 3) * 6 + static_cast<uint32_t>(chunk);
    return at < ring_chunks ? at : at - ring_chunks;
  }
  // For a part of a pair. Of a pair before the first one: passes at once.
  __device__ static void wait(uint64_t (&barriers)[2][4], uint32_t pair, int part) {
    talea::sm90::barrier_wait(&barriers[pair & 1][part], (pair >> 1) & 1);
  }
  __device__ char* q() const { return base + ring_q_at; }
  __device__ char* weights(int tile) const {
    return base + ring_weights_at + tile * ring_weights_bytes;
  }
  __device__ float* exact(int tile) const {
    return reinterpret_cast<float*>(base + ring_exact_at + tile * (2 * ring_weights_bytes));
  }
};

struct RingProducer : ListWalk {
  const Ring& ring;
  RingBeside& beside;
  const Copier copier;
  const uint32_t shared;
  uint32_t pair = 0;

  // A half of the columns of a tile, zeros behind those of a row, once the part five before it is
  // released.
  template <int kTile, int kHalf>
  __device__ void fill(const char* row) {
    namespace ptx = talea::sm90;
    constexpr int part = ring_part(kTile, kHalf), chunks = kHalf == 0 ? 4 : 5;
    const char* rows[4];
    share(row, kTile, rows);
    ring.wait(beside.keys_free, part == 0 ? pair - 2 : pair - 1, part == 0 ? 3 : part - 1);
    const char* from[4];
    int counts[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      from[j] = rows[j] ? rows[j] + copier.bytes : static_cast<const char*>(f.q.data);
      counts[j] = rows[j] ? copier.count : 0;
    }
#pragma unroll
    for (int i = 0; i < chunks; ++i) {
      const int c = kHalf * 4 + i;
      const uint32_t to =
          shared + copier.to + ring.chunk_at(pair, ring_first(part) + i) * chunk_bytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) copy_of_row(to + j * 2048, from[j] + c * 128, c < counts[j]);
    }
    ptx::barrier_arrive_after_copies(&beside.keys_ready[pair & 1][part]);
    // With the part that is scored first: which slots are valid.
    if (kHalf != kTile) return;
    const unsigned valid = __ballot_sync(~0u, row != nullptr);
    if (lane() != 0) return;
    beside.valid[pair & 1][kTile][warp()] = valid >> (16 * kTile) & 0xffff;
    ptx::barrier_arrive(&beside.keys_ready[pair & 1][part]);
  }

  // Eight lanes a row: a thread has a piece of one.
  __device__ void copy_q(const Work& w) const {
    const int head = thread / 8;
    const char* row = static_cast<const char*>(f.q.data);
    if (head < w.heads) row += 2 * cuda::offset(f.q, w.b, w.s, w.head + head);
    const int count = head < w.heads ? copier.count : 0;
    const uint32_t to = shared + ring_q_at + copier.to;
#pragma unroll
    for (int c = 0; c < static_cast<int>(most_columns) / chunk_columns; ++c)
      copy_of_row(to + c * ring_q_chunk_bytes, row + copier.bytes + c * 128, c < count);
  }
  __device__ void give_q(int64_t number, uint32_t works, int pairs) {
    namespace ptx = talea::sm90;
    ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
    if (thread == 0) beside.pairs = pairs;
    copy_q(work_of(f, number));
    ptx::barrier_arrive_after_copies(&beside.q_ready);
    if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
  }

  // The first keys of a list are on their way before the consumers leave the one before.
  __device__ void run() {
    uint32_t works = 0;
    for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
      const int pairs = open(work_of(f, number), number);
      if (pairs == 0) give_q(number, works, 0);
#pragma unroll 1
      for (int i = 0; i < pairs; ++i, ++pair) {
        const char* row = next_row(number);
        fill<0, 0>(row);
        fill<1, 1>(row);
        if (i == 0) give_q(number, works, pairs);
        fill<0, 1>(row);
        fill<1, 0>(row);
      }
    }
  }
};

__device__ inline void fill_ring(const Forward& f, const Ring& ring, RingBeside& beside,
                                 int thread) {
  RingProducer{{f, beside.query[thread / 32], thread},
               ring,
               beside,
               Copier(thread, f.dim),
               talea::sm90::smem_address(ring.base)}
      .run();
}

}  // namespace talea::sparse_attention::sm90
