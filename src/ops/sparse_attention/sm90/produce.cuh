// What: the warpgroup of lane sm90 that fills shared memory: rows of q, and rows of kv by a list.
// Why: the chip has no copy that gathers rows; 16-byte copies do, zeros where a slot is absent.
// Never: reads a row that no valid slot names.
#pragma once

#include "device/sm90/ptx.cuh"
#include "ops/sparse_attention/sm90/work.cuh"

namespace talea::sparse_attention::sm90 {

// A thread copies the same 16-byte piece of every chunk of rows `first_row() + 16 j`, j = 0..3:
// eight lanes a row, four rows a warp, sixteen rows a warpgroup.
struct Copier {
  uint32_t to;  // address of this thread's piece of row first_row() in chunk 0, less the tile's
  int piece;    // columns 8 piece .. 8 piece + 7 of a chunk
  int64_t dim;

  __device__ Copier(int thread, int64_t columns) : piece(thread % 8), dim(columns) {
    const int row = thread / 8;
    to = static_cast<uint32_t>(row * 128 + (piece ^ (row % 8)) * 16);
  }
  // Chunks [first, last) of four rows; absent rows become zeros.
  __device__ void chunks(uint32_t tile, const char* const (&rows)[4], unsigned present, int first,
                         int last) const {
#pragma unroll 1
    for (int c = first; c < last; ++c) {
      const unsigned there =
          c * chunk_columns + piece * 8 < dim ? present : 0;  // the tail is zeros
#pragma unroll
      for (int j = 0; j < 4; ++j)
        talea::sm90::copy_16_bytes(tile + to + c * chunk_bytes + j * 2048,
                                   rows[j] + c * 128 + piece * 16, there >> j & 1);
    }
  }
};

// Lane l of warp w finds the row of slot l / 4 % 4 * 16 + w * 4 + l % 4 of tile l / 16 of a pair.
__device__ inline int slot_of_lane(int warp, int lane) {
  return lane / 16 * tile_keys + lane / 4 % 4 * 16 + warp * 4 + lane % 4;
}

// What a lane needs of its query's list.
struct List {
  QueryRule query;
  int64_t at, stride;  // elements of the indices
  bool counts;
};

// The row of kv, in elements from its data; -1: absent. Foreign indices are counted where asked.
__device__ inline int64_t row_of_slot(const Forward& f, const Work& w, const List& list,
                                      int64_t slot, int64_t index) {
  if (slot >= list.query.slots) return -1;
  const KeyRow found = find_key(f.tables.rule, list.query, slot, index);
  if (list.counts && found.kind == SlotKind::foreign)
    cuda::count(f.tables, f.counters, w.b, w.s, w.g, slot);
  return found.kind == SlotKind::valid ? cuda::offset(f.kv, found.outer, found.inner, w.g) : -1;
}

__device__ inline int64_t index_of_slot(const Forward& f, const List& list, int64_t slot) {
  if (slot >= list.query.slots) return -1;
  return cuda::integer_at(f.tables.indices, list.at + slot * list.stride);
}

__device__ inline void copy_queries(const Forward& f, const Work& w, const Copier& copier,
                                    uint32_t tile, int chunks, int thread) {
  const char* rows[4];
  unsigned present = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = thread / 8 + 16 * j;
    rows[j] = static_cast<const char*>(f.q.data);
    if (row >= w.heads) continue;
    rows[j] += 2 * cuda::offset(f.q, w.b, w.s, w.head + row);
    present |= 1u << j;
  }
  copier.chunks(tile, rows, present, 0, chunks);
}

// Parts of tiles are filled in the order in which the consumers release them: of each tile first
// the columns of the warpgroup that forms its weights.
template <int kHalf>
__device__ void produce(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  namespace ptx = talea::sm90;
  const int warp = thread / 32, lane = thread % 32;
  const Copier copier(thread, f.dim);
  const uint32_t shared = ptx::smem_address(tiles.base);
  constexpr int each = parts_of_half(kHalf);
  uint32_t works = 0, pairs_done = 0;
  for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
    const Work w = work_of(f, number);
    const List list = {cuda::query_rule(f.tables, w.b, w.s),
                       cuda::offset(f.tables.indices, w.b, w.s, w.g), f.tables.indices.stride[3],
                       f.counters && w.tile == 0};
    const int pairs = w.heads > 0 || list.counts ? pairs_of(f, w, list.query.slots) : 0;
    int64_t slot = first_slot(w) + slot_of_lane(warp, lane);
    int64_t index = index_of_slot(f, list, slot);
    for (int pair = 0; pair < pairs || pair == 0; ++pair) {
      int64_t row = -1;
      if (pairs > 0) {
        row = row_of_slot(f, w, list, slot, index);
        slot += 2 * tile_keys;
        index = index_of_slot(f, list, slot);  // of the next pair
      }
      const unsigned valid = __ballot_sync(~0u, row >= 0);
      const uint32_t phase = (pairs_done & 1) ^ 1;
      const auto fill = [&](int t, int half) {
        const char* rows[4];
        unsigned present = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int64_t at = __shfl_sync(~0u, row, t * 16 + j * 4 + lane / 8);
          rows[j] = static_cast<const char*>(at >= 0 ? f.kv.data : f.q.data);
          rows[j] += at >= 0 ? 2 * at : 0;
          present |= (at >= 0 ? 1u : 0u) << j;
        }
#pragma unroll 1
        for (int k = half * each; k < (half + 1) * each; ++k) {
          const Part part = part_of<kHalf>(tiles.plan, k);
          ptx::barrier_wait(&beside.keys_free[t][k], phase);
          copier.chunks(shared + tiles.keys_at(t), rows, present, part.first, part.last);
          ptx::barrier_arrive_after_copies(&beside.keys_ready[t][k]);
          // With the first part: which slots are valid. Only the warpgroup that releases this part
          // reads the mask, before it does: the wait above stands between its reading and this.
          if (k != t * each || lane != 0) continue;
          beside.valid[t][warp] = valid >> (16 * t) & 0xffff;
          ptx::barrier_arrive(&beside.keys_ready[t][k]);
        }
      };
      if (pairs > 0) fill(0, 0);
      if (pair == 0) {
        ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
        if (thread == 0) beside.pairs = pairs;
        copy_queries(f, w, copier, shared, tiles.plan.columns, thread);
        ptx::barrier_arrive_after_copies(&beside.q_ready);
        if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
      }
      if (pairs == 0) break;
      fill(1, 1);
      fill(0, 1);
      fill(1, 0);
      ++pairs_done;
    }
  }
}

}  // namespace talea::sparse_attention::sm90
