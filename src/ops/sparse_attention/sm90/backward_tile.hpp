// What: shared memory of lane sm90's backward pass, and the plain values that its kernels get.
// Why: host and kernels lay out shared memory and contributions by one function.
// Never: holds a rule of attention.
#pragma once

#include "ops/sparse_attention/sm90/tile.hpp"

namespace talea::sparse_attention::sm90 {

// Chunks of 64 columns of a row: warpgroup 0 multiplies `first` of them, warpgroup 1 the others.
// Rows of fewer chunks are filled up with zeros, d_o too.
struct BackwardChunks {
  int first = 0, second = 0;
  constexpr int all() const { return first + second; }
  constexpr int values() const {
    constexpr int most = most_value_columns / chunk_columns;
    return all() < most ? all() : most;
  }
};
inline constexpr BackwardChunks backward_chunks[] = {{1, 1}, {1, 2}, {2, 3}, {4, 5}};
constexpr int chunks_of_columns(int64_t columns) {
  return static_cast<int>((columns + chunk_columns - 1) / chunk_columns);
}
// The narrowest of backward_chunks that holds a row.
constexpr int width_of(int64_t dim) {
  int width = 0;
  while (backward_chunks[width].all() < chunks_of_columns(dim)) ++width;
  return width;
}

inline constexpr int64_t most_shared_bytes = 232448;
inline constexpr int backward_parts = 6;  // in which a tile of keys arrives: three of each half

// P and dS of 64 heads and a tile of keys, as they lie in shared memory, one behind the other.
inline constexpr int weights_bytes = 2 * chunk_bytes;

// What lies behind q, d_o, a tile of keys, and the tiles of P and dS.
struct BackwardBeside {
  uint64_t q_ready, q_free, weights_free;
  uint64_t keys_ready[backward_parts], keys_free[backward_parts];
  uint64_t valid[2];           // [tile % 2]: a bit a slot
  int tiles, far;              // of keys; whether an lse of the work lies far from 0
  QueryRule query[4];          // of each warp that copies
  int64_t rows[2][tile_keys];  // [tile % 2]: where a slot's row of dkv begins; -1: absent
};

constexpr int64_t backward_shared_bytes(int64_t dim) {
  const BackwardChunks c = backward_chunks[width_of(dim)];
  return int64_t{chunk_bytes} * (2 * c.all() + c.values() + 2) + int64_t{sizeof(BackwardBeside)};
}

// An fp32 lse is off by up to 2^-24 of itself, and the weights of its row with it: below this by
// less than a sixteenth of what rounding a weight to bf16 takes.
inline constexpr float far_from_zero = 2048;

struct Backward {
  Forward f;            // what both passes read: tables, q, kv, sink, and lse, an input here
  View d_o, d_lse, dq;  // may be absent
  View sums;            // fp32, as dkv: added to by reductions in order of arrival
  const float* delta = nullptr;    // [batch, queries, heads]
  float* sink_share = nullptr;     // alike: of rows far from 0 it is set right; may be null
  char* weights = nullptr;         // P and dS: [works of this launch, tiles of keys, 64, 64] twice
  float* contributions = nullptr;  // [lists of this launch, sums, slots, dim]
  int64_t first_list = 0, last_list = 0;  // a list: of a query and group
  int64_t key_tiles = 0;                  // of a list
  // P and dS enter products times 2^-exponent and scale * 2^-exponent; results times 2^exponent.
  float exponent = 0, grown = 1;
  bool wants_dkv = false, dq_words = false;
  bool adds = false;  // dkv within the kernel that forms dq, a block's heads each
};

// Bytes from `weights` to those of a work and tile of keys.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int64_t
    weights_at(const Backward& p, int64_t work, int64_t tile) {
  return ((work - p.first_list * p.f.head_tiles) * p.key_tiles + tile) * weights_bytes;
}

// dkv of a list: its tiles of heads are summed on chip one or two at a time, a group of chunks of
// columns a block. Rows of q and d_o of these columns stay; P and dS pass by.
inline constexpr int sum_groups = 2, most_stages = 2 * sum_groups;  // groups: that multiply
struct SumPlan {
  int head_tiles = 1;       // at a time
  int sums = 1;             // how often: head tiles of a group / head_tiles
  int groups = 1;           // of columns
  int chunks = 1;           // of a group, at most
  int stages = sum_groups;  // of P and dS; a warpgroup has its own
};
struct SumBeside {
  uint64_t q_ready, q_free, ready[most_stages], free[most_stages];
  int tiles;
  int64_t rows[most_stages][tile_keys];  // where a slot's contribution begins; -1: absent
  QueryRule query;
};
constexpr int64_t sum_shared_bytes(const SumPlan& s) {
  return int64_t{chunk_bytes} * s.head_tiles * (2 * s.chunks + 2 * s.stages) +
         int64_t{sizeof(SumBeside)};
}
constexpr SumPlan sum_plan(int64_t dim, int64_t head_tiles) {
  SumPlan s;
  s.head_tiles = head_tiles % 2 == 0 ? 2 : 1;
  s.sums = static_cast<int>(head_tiles / s.head_tiles);
  const int all = chunks_of_columns(dim), most = s.head_tiles == 2 ? 5 : 9;
  s.groups = (all + most - 1) / most;
  s.chunks = (all + s.groups - 1) / s.groups;
  SumPlan more = s;
  more.stages += sum_groups;
  return sum_shared_bytes(more) <= most_shared_bytes ? more : s;
}

void launch_backward_bf16(const Backward& b, unsigned blocks, cudaStream_t stream);
void launch_backward_f16(const Backward& b, unsigned blocks, cudaStream_t stream);
void launch_sums_bf16(const Backward& b, unsigned blocks, cudaStream_t stream);
void launch_sums_f16(const Backward& b, unsigned blocks, cudaStream_t stream);

}  // namespace talea::sparse_attention::sm90
