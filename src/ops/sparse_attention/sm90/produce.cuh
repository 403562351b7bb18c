// What: the warpgroup of lane sm90 that fills shared memory: rows of q, and rows of kv by a list.
// Why: the chip has no copy that gathers rows; 16-byte copies do, zeros where a slot is absent.
// Never: reads a row that no valid slot names.
#pragma once

#include "device/sm90/ptx.cuh"
#include "ops/sparse_attention/key_range.hpp"
#include "ops/sparse_attention/sm90/work.cuh"

namespace talea::sparse_attention::sm90 {

// 16 bytes of a row that is copied in pieces, with what lies beside them on their way into the L2
// cache; `present` false: zeros, and nothing is read.
__device__ __forceinline__ void copy_of_row(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}

// A thread copies the same 16-byte piece of every chunk of rows `thread / 8 + 16 j`, j = 0..3:
// eight lanes a row, four rows a warp, sixteen rows a warpgroup.
struct Copier {
  uint32_t to;  // address of this thread's piece of row thread / 8 in chunk 0, less the tile's
  int bytes;    // of this thread's piece in chunk 0
  int count;    // chunks in which this thread's piece is of a row

  __device__ Copier(int thread, int64_t columns)
      : to(static_cast<uint32_t>(thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16)),
        bytes(thread % 8 * 16),
        count((static_cast<int>(columns) - thread % 8 * 8 + chunk_columns - 1) / chunk_columns) {}
  // Chunks [kFirst, last), kMost of them at most, of four rows; null: an absent one, of zeros.
  // Where a chunk lies is known when this is compiled: addresses stand in the instructions, so that
  // no copy waits until another one has read its registers. kWhole: `last` lies behind them all,
  // and none is the tail of a row. somewhere: an address of 16 bytes that may be read.
  template <int kFirst, int kMost, bool kWhole = false>
  __device__ void chunks(uint32_t tile, const char* const (&rows)[4], int last,
                         const void* somewhere) const {
    const char* from[4];
    int counts[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      from[j] = rows[j] ? rows[j] + bytes : static_cast<const char*>(somewhere);
      counts[j] = rows[j] ? count : 0;
      asm volatile("" : "+l"(from[j]), "+r"(counts[j]));  // what stands in registers
    }
    const uint32_t at = tile + to;
#pragma unroll
    for (int c = kFirst; c < kFirst + kMost; ++c) {
      if (!kWhole && c >= last) break;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        copy_of_row(at + c * chunk_bytes + j * 2048, from[j] + c * 128,
                    kWhole ? counts[j] != 0 : c < counts[j]);
    }
  }
};

// Lane l of warp w finds the row of slot l / 4 % 4 * 16 + w * 4 + l % 4 of tile l / 16 of a pair.
__device__ inline int slot_of_lane(int warp, int lane) {
  return lane / 16 * tile_keys + lane / 4 % 4 * 16 + warp * 4 + lane % 4;
}

__device__ inline void copy_queries(const Forward& f, const Work& w, const Copier& copier,
                                    uint32_t tile, int chunks, int thread) {
  const char* rows[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = thread / 8 + 16 * j;
    rows[j] = row < w.heads ? static_cast<const char*>(f.q.data) +
                                  2 * cuda::offset(f.q, w.b, w.s, w.head + row)
                            : nullptr;
  }
  copier.chunks<0, most_columns / chunk_columns>(tile, rows, chunks, f.q.data);
}

// How a warp walks through the list of a work: lane l has slot slot_of_lane() of every pair.
struct ListWalk {
  const Forward& f;
  QueryRule& query;  // of this warp, in shared memory
  const int thread;
  // Of the list at hand.
  KeyRange range;
  int64_t slots, slot, index;  // slot: this lane's of the next pair; index: what stands there
  const char* indices;         // of the list
  const char* keys;            // row 0 of the batch entry and group

  __device__ int warp() const { return thread / 32; }
  __device__ int lane() const { return thread % 32; }
  __device__ int64_t read_index() const {
    if (slot >= slots) return -1;
    const int64_t at = slot * f.tables.indices.stride[3];
    return f.tables.indices.dtype == DType::i32 ? reinterpret_cast<const int32_t*>(indices)[at]
                                                : reinterpret_cast<const int64_t*>(indices)[at];
  }

  // Pairs of a work's list.
  __device__ int open(const Work& w, int64_t number) {
    const cuda::Tables& t = f.tables;
    __syncwarp();
    if (lane() == 0) query = cuda::query_rule(t, w.b, w.s);
    __syncwarp();
    const bool counts = f.counters && w.tile == 0;
    range = key_range(t.rule, query);
    if (counts) range.known = false;
    slots = query.slots;
    slot = first_slot(w) + slot_of_lane(warp(), lane());
    indices = static_cast<const char*>(t.indices.data) +
              cuda::offset(t.indices, w.b, w.s, w.g) * (t.indices.dtype == DType::i32 ? 4 : 8);
    keys = static_cast<const char*>(f.kv.data) + 2 * cuda::offset(f.kv, query.batch, 0, w.g);
    index = read_index();
    return w.heads > 0 || counts ? pairs_of(f, w, slots) : 0;
  }

  // The row of a slot as the rule finds it; foreign indices are counted where asked.
  __device__ const char* find_row(int64_t number) const {
    const Work w = work_of(f, number);
    const KeyRow found = find_key(f.tables.rule, query, slot, index);
    if (f.counters && w.tile == 0 && slot < slots && found.kind == SlotKind::foreign)
      cuda::count(f.tables, f.counters, w.b, w.s, w.g, slot);
    if (found.kind != SlotKind::valid) return nullptr;
    return static_cast<const char*>(f.kv.data) +
           2 * cuda::offset(f.kv, found.outer, found.inner, w.g);
  }
  // This lane's row of the next pair; null: absent.
  __device__ const char* next_row(int64_t number) {
    const char* row = nullptr;
    if (!range.known)
      row = find_row(number);
    else if (slot < slots && index >= range.low && index < range.high)
      row = keys + (index + range.shift) * f.kv.stride[1] * 2;
    slot += 2 * tile_keys;
    index = read_index();
    return row;
  }
  // The four rows of tile t that this thread copies a piece of, from the lanes that found them.
  __device__ void share(const char* row, int t, const char* (&rows)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      rows[j] = reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), t * 16 + j * 4 + lane() / 8));
  }
};

// Parts of tiles are filled in the order in which the consumers release them: of each tile first
// the columns of the warpgroup that forms its weights.
template <int kHalf>
struct Producer : ListWalk {
  static constexpr int half_chunks = kHalf / chunk_columns;
  static constexpr int all_chunks = most_columns / chunk_columns;

  const Tiles& tiles;
  Beside& beside;
  const Copier copier;
  const uint32_t shared;

  template <int kPart>
  __device__ void fill(int t, const char* row, uint32_t pair) {
    namespace ptx = talea::sm90;
    const char* rows[4];
    share(row, t, rows);
    Beside& b = tiles.at(beside, pair);
    ptx::barrier_wait(&b.keys_free[t][kPart], tiles.phase(pair) ^ 1);
    const uint32_t to = shared + tiles.keys_at(t, pair);
    if constexpr (kPart == 0)
      copier.chunks<0, half_chunks, (kHalf > 64)>(to, rows, tiles.plan.columns, f.q.data);
    else
      copier.chunks<half_chunks, all_chunks - half_chunks>(to, rows, tiles.plan.columns, f.q.data);
    ptx::barrier_arrive_after_copies(&b.keys_ready[t][kPart]);
    // With the part that is scored first: which slots are valid. Only the warpgroup that releases
    // this part reads the mask, before it does: the wait above stands between its reading and this.
    if (kPart != t) return;
    const unsigned valid = __ballot_sync(~0u, row != nullptr);
    if (lane() != 0) return;
    b.valid[t][warp()] = valid >> (16 * t) & 0xffff;
    ptx::barrier_arrive(&b.keys_ready[t][kPart]);
  }

  __device__ void run() {
    namespace ptx = talea::sm90;
    static_assert(parts_of_half(kHalf) == 1);
    uint32_t works = 0, done = 0;
    for (int64_t number = blockIdx.x; number < f.work; number += gridDim.x, ++works) {
      int pairs;
      {
        const Work w = work_of(f, number);
        pairs = open(w, number);
        ptx::barrier_wait(&beside.q_free, (works & 1) ^ 1);
        if (thread == 0) beside.pairs = pairs;
        copy_queries(f, w, copier, shared, tiles.plan.columns, thread);
        ptx::barrier_arrive_after_copies(&beside.q_ready);
        if (thread == 0) ptx::barrier_arrive(&beside.q_ready);
      }
#pragma unroll 1
      for (int pair = 0; pair < pairs; ++pair, ++done) {
        const char* row = next_row(number);
        fill<0>(0, row, done);
        fill<1>(1, row, done);
        fill<1>(0, row, done);
        fill<0>(1, row, done);
      }
    }
  }
};

template <int kHalf>
__device__ void produce(const Forward& f, const Tiles& tiles, Beside& beside, int thread) {
  Producer<kHalf>{{f, beside.query[thread / 32], thread},
                  tiles,
                  beside,
                  Copier(thread, f.dim),
                  talea::sm90::smem_address(tiles.base)}
      .run();
}

}  // namespace talea::sparse_attention::sm90
