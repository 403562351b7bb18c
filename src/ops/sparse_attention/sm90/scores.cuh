// What: the two warpgroups that form the weights of a pair of tiles, for blocks that sum values
// later, and leave the values of those tiles beside them.
// Why: few queries fill the chip when their keys lie side by side.
// Never: sums a value.
#pragma once

#include "ops/sparse_attention/sm90/consume.cuh"
#include "ops/sparse_attention/sm90/weigh.cuh"

namespace talea::sparse_attention::sm90 {

template <int kHalf, bool kF16, int kGroup, Rows kRows>
struct WeightWriter : Consumer<kHalf, kF16, kGroup, kRows> {
  using Base = Consumer<kHalf, kF16, kGroup, kRows>;
  using Base::beside, Base::f, Base::thread, Base::tiles, Base::pairs_done;

  // Slices of the columns of this warpgroup's tile, as narrow_descriptor reads them.
  __device__ void write_values(int64_t list, int64_t tile) const {
    const int row = thread / 2, place = thread % 2 ^ (row / 4 % 2);
    const int64_t step = f.stored.tiles * slice_bytes;  // of a slice
    char* to = f.stored.values + list * f.stored.slices * step + tile * slice_bytes + thread * 16;
    for (int i = 0; i < 2 * f.stored.slices; ++i) {
      const int column = i % 2 * kHalf + i / 2 * slice_columns, chunk = column / chunk_columns;
      if (chunk >= tiles.plan.columns) continue;
      const int piece = column % chunk_columns / 8 + place;
      *reinterpret_cast<uint4*>(to + i / 2 * step + i % 2 * (slice_bytes / 2)) =
          *reinterpret_cast<const uint4*>(tiles.keys(kGroup, pairs_done) + chunk * chunk_bytes +
                                          row * 128 + (piece ^ (row % 8)) * 16);
    }
  }
  __device__ void run() {
    uint32_t works = 0;
    ptx::begin_after_earlier_kernels();
    for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
      const Work w = work_of(f, number);
      ptx::barrier_wait(&beside.q_ready, works & 1);
      const int pairs = __shfl_sync(~0u, *const_cast<volatile int*>(&beside.pairs), 0);
      ptx::fence_async_shared();
      for (int pair = 0; pair < pairs; ++pair, ++pairs_done) {
        float s[32];
        this->template score<true>(s);
        this->template score<false>(s);
        ptx::warpgroup_wait<0>();
        ptx::hold_registers(s);
        const uint64_t slots = this->valid();
        scale_and_mask(s, slots, f.scale);
        const int64_t list = (w.b * f.tables.queries + w.s) * f.tables.groups + w.g;
        const int tile = 2 * (w.segment + pair) + kGroup;
        write_weights<kF16>(f, s, slots != 0, list * f.head_tiles + w.tile, tile, thread, [&] {
          if (f.head_tiles == 1 || w.tile == kGroup) write_values(list, tile);
        });
        count_written(f, list, 2 + kGroup, thread);
        this->free_part(kGroup, 0, pairs_done);
        this->free_part(kGroup, 1, pairs_done);
      }
      arrive_warp(&beside.q_free);
    }
  }
};

}  // namespace talea::sparse_attention::sm90
