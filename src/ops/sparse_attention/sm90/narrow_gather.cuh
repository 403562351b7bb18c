// What: copies of q and of the rows of a list to the shared memory of a block of narrow.cuh.
// Why: all threads copy what all of them multiply: none waits for a warpgroup that fills tiles.
// Never: reads a row that no valid slot names, or columns behind those of a row.
#pragma once

#include "ops/sparse_attention/sm90/narrow_list.cuh"

namespace talea::sparse_attention::sm90 {

template <class S>
struct NarrowGather : NarrowSlots<S> {
  using NarrowSlots<S>::f;
  using NarrowSlots<S>::thread;
  uint32_t row = 0, there = 0;  // of the pair that is copied; a bit a lane: whether it has one

  __device__ void next() { row = this->next_row(there); }

  // Begins to copy tile kTile of a pair.
  template <int kTile>
  __device__ void copy(int pair) const {
    namespace ptx = talea::sm90;
    const int warp = thread / 32, lane = thread % 32, piece = lane % 8;
    const char* from[4];
    const char* const base = f.rows_from + piece * 16;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      from[j] = base + uint64_t{__shfl_sync(~0u, row, kTile * 16 + j * 4 + lane / 8)} * 16;
    const uint32_t mine = there >> (kTile * 16 + lane / 8);
    const uint32_t last = (S::columns - 1) * chunk_columns + piece * 8 < f.dim ? mine : 0;
    const uint32_t to =
        ptx::smem_address(S::memory()) + (thread / 8 * 128 + (piece ^ thread / 8 % 8) * 16);
#pragma unroll
    for (int c = 0; c < S::columns; ++c)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        copy_of_row(to + S::template chunk_at<kTile>(c, pair) + j * 2048, from[j] + c * 128,
                    ((c + 1 < S::columns ? mine : last) >> 4 * j & 1) != 0);
    NarrowBeside& beside = S::beside();
    ptx::barrier_arrive_after_copies(&beside.keys_ready[kTile]);
    if (lane != 0) return;
    beside.valid[kTile][warp] = static_cast<uint16_t>(there >> 16 * kTile);
    ptx::barrier_arrive(&beside.keys_ready[kTile]);
  }

  // Rows of q: 64 of them, or of up to 32 heads as many.
  __device__ void copy_q(const Work& w) const {
    namespace ptx = talea::sm90;
    constexpr int count = S::rows == 1 ? 2 : 4;
    const int piece = thread % 8, line = thread / 8;
    const char* from = static_cast<const char*>(f.q.data) + piece * 16 +
                       2 * cuda::offset(f.q, w.b, w.s, w.head + line);
    const int64_t next = f.q.stride[2] * 2 * 16;
    const uint32_t to = ptx::smem_address(S::memory()) + (line * 128 + (piece ^ line % 8) * 16);
    const bool whole = (S::columns - 1) * chunk_columns + piece * 8 < f.dim;
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const bool present = line + 16 * j < w.heads;
      const char* row = present ? from + next * j : static_cast<const char*>(f.q.data);
#pragma unroll
      for (int c = 0; c < S::columns; ++c)
        copy_of_row(to + c * S::plan.q_bytes + j * 2048, row + c * 128,
                    present && (c + 1 < S::columns || whole));
    }
  }
};

}  // namespace talea::sparse_attention::sm90
