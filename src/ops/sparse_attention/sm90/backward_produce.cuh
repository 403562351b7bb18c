// What: the warpgroup of the backward pass that fills shared memory: q, d_o, and rows of kv.
// Why: while two warpgroups form dkv of a tile, the keys of the next are on their way.
// Never: reads a row that no valid slot names.
#pragma once

#include "ops/sparse_attention/sm90/backward_work.cuh"
#include "ops/sparse_attention/sm90/produce.cuh"

namespace talea::sparse_attention::sm90 {

// `count` chunks, kMost at most, of `columns` columns of rows of a query's heads, those of this
// work alone; the first is chunk `first` of the rows.
template <int kMost>
__device__ inline void copy_heads(const View& from, const Work& w, int64_t columns, uint32_t to,
                                  int first, int count, int thread, const View& other) {
  const char* rows[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = thread / 8 + 16 * j;
    rows[j] = row < w.heads && from.present
                  ? static_cast<const char*>(from.data) +
                        2 * cuda::offset(from, w.b, w.s, w.head + row) + first * 128
                  : nullptr;
  }
  const Copier copier(thread, columns - first * chunk_columns);
  copier.chunks<0, kMost>(to, rows, count, other.data);
}

// The row that a slot of list `list` names. Foreign indices are counted where asked.
__device__ inline KeyRow find_slot(const Forward& f, const QueryRule& query, int64_t list, int slot,
                                   bool counts) {
  if (slot >= query.slots) return {};
  const cuda::Tables& t = f.tables;
  const int64_t g = list % t.groups, s = list / t.groups % t.queries;
  const int64_t index =
      cuda::integer_at(t.indices, cuda::offset(t.indices, query.batch, s, g, slot));
  const KeyRow found = find_key(t.rule, query, slot, index);
  if (counts && found.kind == SlotKind::foreign)
    cuda::count(t, f.counters, query.batch, s, g, slot);
  return found;
}

// Whether an lse of this work's heads lies far from 0. For a warp.
__device__ inline bool lies_far(const Backward& p, const Work& w) {
  bool far = false;
  for (int h = static_cast<int>(threadIdx.x) % 32; h < w.heads; h += 32) {
    const float lse = cuda::number_at(p.f.lse, cuda::offset(p.f.lse, w.b, w.s, w.head + h));
    far |= fabsf(lse) >= far_from_zero && fabsf(lse) < INFINITY;
  }
  return __any_sync(~0u, far);
}

// The parts of a tile of keys from part kPart on. first: once the first of all is under way.
template <int kFirst, int kSecond, bool kAdds, int kPart, typename F>
__device__ inline void fill_parts(const Copier& copier, BackwardBeside& beside, uint32_t keys,
                                  const char* const (&rows)[4], const void* somewhere,
                                  uint32_t phase, const F& first) {
  constexpr Part part = backward_part<kFirst, kSecond, kAdds>(kPart);
  talea::sm90::barrier_wait(&beside.keys_free[kPart], phase);
  copier.template chunks<part.first, part.last - part.first>(keys, rows, part.last, somewhere);
  talea::sm90::barrier_arrive_after_copies(&beside.keys_ready[kPart]);
  if constexpr (kPart == 0) first();
  if constexpr (kPart + 1 < backward_parts)
    fill_parts<kFirst, kSecond, kAdds, kPart + 1>(copier, beside, keys, rows, somewhere, phase,
                                                  first);
}

// A work that lies far from 0 sees its keys twice.
template <int kFirst, int kSecond, bool kAdds>
__device__ void produce_backward(const Backward& p, const BackwardTiles<kFirst, kSecond>& tiles,
                                 BackwardBeside& beside, int thread) {
  namespace ptx = talea::sm90;
  const Forward& f = p.f;
  const int warp = thread / 32, lane = thread % 32;
  const Copier copier(thread, f.dim);
  const uint32_t keys = ptx::smem_address(tiles.keys());
  QueryRule& query = beside.query[warp];
  uint32_t works = 0, tiles_done = 0;
  const int64_t end = p.last_list * f.head_tiles;
  for (int64_t number = p.first_list * f.head_tiles + blockIdx.x; number < end;
       number += gridDim.x, ++works) {
    int count = 0;
    bool far = false;
    {
      const Work w = work_of(f, number);
      __syncwarp();
      if (lane == 0) query = cuda::query_rule(f.tables, w.b, w.s);
      __syncwarp();
      if (w.heads > 0 || (f.counters && w.tile == 0)) count = tiles_of(query.slots);
      far = lies_far(p, w);
    }
    const int turns = far ? 2 * count : count;
#pragma unroll 1
    for (int turn = 0; turn < turns || turn == 0; ++turn) {
      const int tile = turn < count ? turn : turn - count;
      if (count > 0) {
        int64_t row = -1, sum = -1;
        const int line = lane / 4 * 16 + warp * 4 + lane % 4;  // of lanes 0..15
        if (lane < 16) {
          const int64_t list = number / f.head_tiles;
          const KeyRow found = find_slot(f, query, list, tile * tile_keys + line,
                                         f.counters && number % f.head_tiles == 0 && tile == turn);
          if (found.kind == SlotKind::valid) {
            row = cuda::offset(f.kv, found.outer, found.inner, list % f.tables.groups);
            if constexpr (kAdds)
              sum = cuda::offset(p.sums, found.outer, found.inner, list % f.tables.groups);
          }
        }
        const unsigned valid = __ballot_sync(~0u, row >= 0);
        const char* rows[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int64_t at = __shfl_sync(~0u, row, j * 4 + lane / 8);
          rows[j] = at >= 0 ? static_cast<const char*>(f.kv.data) + 2 * at : nullptr;
        }
        // With the first part: which slots are valid, and where their sums lie.
        const auto tell = [&] {
          if (kAdds && lane < 16) beside.rows[tiles_done % 2][line] = sum;
          __syncwarp();
          if (lane != 0) return;
          reinterpret_cast<uint16_t*>(&beside.valid[tiles_done % 2])[warp] =
              static_cast<uint16_t>(valid);
          ptx::barrier_arrive(&beside.keys_ready[0]);
        };
        fill_parts<kFirst, kSecond, kAdds, 0>(copier, beside, keys, rows, f.q.data,
                                              (tiles_done & 1) ^ 1, tell);
        ++tiles_done;
      }
      if (turn > 0) continue;
      const Work w = work_of(f, number);
      ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
      if (thread == 0) {
        beside.tiles = count;
        beside.far = far;
      }
      copy_heads<tiles.columns>(f.q, w, f.dim, ptx::smem_address(tiles.queries()), 0, tiles.columns,
                                thread, f.q);
      copy_heads<tiles.values>(p.d_o, w, f.value_dim, ptx::smem_address(tiles.upstream()), 0,
                               tiles.values, thread, f.q);
      ptx::barrier_arrive_after_copies(&beside.q_ready);
      if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
    }
  }
}

}  // namespace talea::sparse_attention::sm90
