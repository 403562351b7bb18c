// What: the tiles of lane sm90 in shared memory, and the plain value that its kernel gets.
// Why: host and kernel lay out shared memory by one function.
// Never: holds a rule of attention.
#pragma once

#include "ops/sparse_attention/foreign.cuh"
#include "ops/sparse_attention/key_range.hpp"

namespace talea::sparse_attention::sm90 {

inline constexpr int tile_heads = 64, tile_keys = 64;
inline constexpr int chunk_columns = 64, chunk_bytes = 8192;  // 64 rows of 128 bytes, swizzled
inline constexpr int producer_threads = 128, consumer_threads = 256;
inline constexpr int threads = producer_threads + consumer_threads;
inline constexpr int64_t most_columns = 576, most_value_columns = 512;

// A tile is filled and released in parts: each half of the columns, that of a warpgroup's values,
// in as many. In two, 512 columns of values took a tenth longer: more products of fewer columns.
constexpr int parts_of_half(int) { return 1; }

// Of what two pairs of tiles take with q and weights: what lies beside has room, too.
inline constexpr int most_ring_chunks = 27;

// Chunks of 64 columns. Tile 0 holds its weights in its last chunk where that is no column of a
// value: its scores have read it by then. Tile 1 has no time for that: its weights have a chunk
// behind.
struct TilePlan {
  int columns = 0;     // chunks of q, and of kv that hold something
  int keys = 0;        // chunks of a tile of keys
  bool apart = false;  // the weights of tile 0 have a chunk of their own, too
  int ring = 1;        // pairs of tiles: two where there is room
};
constexpr int chunks_of(const TilePlan& p) {
  return p.columns + p.ring * (2 * p.keys + 1 + (p.apart ? 1 : 0));
}
constexpr TilePlan tile_plan(int64_t dim, int half) {
  const int columns = static_cast<int>((dim + chunk_columns - 1) / chunk_columns);
  const int values = 2 * half / chunk_columns;
  TilePlan p = {columns, columns > values ? columns : values, columns <= values};
  p.ring = 2;
  if (half > 128 || chunks_of(p) > most_ring_chunks) p.ring = 1;
  return p;
}

// The list whose rows the warpgroup that fills tiles looks up, ahead of those that multiply.
struct Ahead {
  QueryRule query;
  int64_t at, stride;  // elements of its indices
  int64_t b, s, g, slot;
  int pairs;
  bool counts;
};

// What lies behind the tiles.
struct Beside {
  uint64_t q_ready, q_free;
  uint64_t keys_ready[2][4], keys_free[2][4];  // [tile][part of its columns]
  uint64_t weights_ready[2], sums_ready[2];
  // [tile][warp that fills, of the other block behind]: a bit a slot, 16 of them.
  alignas(16) uint32_t valid[2][8];
  Ahead ahead;           // of packed rows
  QueryRule query[4];    // of each warp that copies plain ones
  int pairs;             // of tiles of keys
  uint32_t moved[2][2];  // [pair % 2][warpgroup]: the pair, from 1, in which it moved a reference
  int seen[2];           // whether a warpgroup saw a valid slot
  float reference[2][2][tile_heads];  // [pair % 2][warpgroup]
  float sum[2][tile_heads], top[2][tile_heads];
};

constexpr int64_t shared_bytes(int64_t dim, int half) {
  const TilePlan p = tile_plan(dim, half);
  return int64_t{chunk_bytes} * chunks_of(p) + p.ring * int64_t{sizeof(Beside)};
}

// Rows of up to this many chunks, and values of up to two, have a kernel of one warpgroup a block.
// Registers hold the sums of one chunk of values, or two, for so many blocks a multiprocessor.
inline constexpr int most_narrow_columns = 3, most_narrow_value_columns = 128;
constexpr int narrow_columns(int64_t dim) {
  return static_cast<int>((dim + chunk_columns - 1) / chunk_columns);
}
constexpr bool narrow_wide(int64_t dim, int64_t value_dim) {
  return value_dim > chunk_columns || narrow_columns(dim) == most_narrow_columns;
}
constexpr int narrow_blocks(bool wide) { return wide ? 3 : 4; }
// Chunks of a block: q, of which 32 heads take half of one each; two tiles of keys. The second
// chunk of the first tile has two places, in turn, where there is room and wide values keep it
// longest.
struct NarrowPlan {
  int q_bytes = 0;  // of a chunk
  bool spare = false;
  int keys_at = 0, spare_at = 0, bytes = 0;
};
constexpr NarrowPlan narrow_plan(int columns, bool wide, bool few) {
  NarrowPlan p;
  p.q_bytes = few ? chunk_bytes / 2 : chunk_bytes;
  p.spare = wide && (few || columns < most_narrow_columns);
  p.keys_at = columns * p.q_bytes;
  p.spare_at = p.keys_at + 2 * columns * chunk_bytes;
  p.bytes = p.spare_at + (p.spare ? chunk_bytes : 0);
  return p;
}
// Of the list at hand, the same for all threads: registers hold sums.
struct NarrowList {
  KeyRange range;
  QueryRule query;
  const char* indices;  // of the list
  int slots, pairs;
  int low, high;              // of the range
  uint32_t keys, key_stride;  // row 0 of the batch entry and group, in 16 bytes
  int b, s, g, heads;         // of the work
  int64_t head;
};
struct NarrowBeside {
  uint64_t q_ready, keys_ready[2];
  alignas(8) uint16_t valid[2][4];  // [tile][warp]: a bit a slot
  NarrowList list;
};
constexpr int64_t narrow_shared_bytes(int64_t dim, int64_t value_dim, int64_t heads) {
  const bool few = heads <= tile_heads / 2;
  return narrow_plan(narrow_columns(dim), narrow_wide(dim, value_dim), few).bytes +
         int64_t{sizeof(NarrowBeside)};
}

// Up to this many heads of a group have a kernel in which keys are the rows of the products: tiles
// of 64 keys x 16 heads. What q leaves of shared memory is a ring of chunks of keys, in which a
// pair of tiles has its place whatever its columns: parts of four chunks and of five, as they are
// filled.
inline constexpr int most_few_heads = 16;
inline constexpr int ring_chunks = 24, pair_chunks = 18;
inline constexpr int ring_q_chunk_bytes = most_few_heads * 128;
inline constexpr int ring_q_at = ring_chunks * chunk_bytes;
inline constexpr int ring_weights_at =
    ring_q_at + static_cast<int>(most_columns) / chunk_columns * ring_q_chunk_bytes;
inline constexpr int ring_weights_bytes = 2 * most_few_heads * tile_keys;  // of a tile, 16 bits
inline constexpr int ring_exact_at = ring_weights_at + 2 * ring_weights_bytes;  // in fp32
inline constexpr int ring_beside_at = ring_exact_at + 4 * ring_weights_bytes;
// Number of the part of tile t that holds half `half` of the columns, and its first chunk: the
// order in which the consumers release them. Five parts in a row fit into the ring, whichever they
// are.
constexpr int ring_part(int t, int half) { return t == half ? t : 3 - half; }
constexpr int ring_first(int part) { return part == 0 ? 0 : 5 * part - 1; }
static_assert(ring_chunks >= pair_chunks + 5);

struct RingBeside {
  uint64_t q_ready, q_free;
  // Of every second pair: [pair % 2][part].
  uint64_t keys_ready[2][4], keys_free[2][4];
  uint64_t weights_ready[2], sums_ready[2];
  uint32_t valid[2][2][4];  // [pair % 2][tile][warp that fills]: a bit a slot, 16 of them
  uint32_t moved[2][2];     // as in Beside
  int pairs, seen[2];
  QueryRule query[4];
  float reference[2][2][most_few_heads];                    // [pair % 2][warpgroup]
  alignas(16) float most[2][most_few_heads][4];             // [warpgroup][head][warp]
  float sum[2][4][most_few_heads], top[2][most_few_heads];  // [warpgroup][warp]
};
constexpr int64_t ring_shared_bytes() { return ring_beside_at + int64_t{sizeof(RingBeside)}; }

// Where a block finds its keys: rows that it gathers; packed rows; packed rows of which each of the
// two blocks of a cluster, which have one query's heads, dequantises half for both; or weights and
// values that other blocks left in the workspace.
enum class Rows { plain, packed, shared, stored };

// What a block of a cluster is sent of a half of a tile: half of its rows; with the half that is
// scored first, words that say which of them are valid.
constexpr uint32_t bytes_of_half(int tile, int half) {
  return 2 * chunk_bytes + (half == 1 ? chunk_bytes / 2 : 0) + (half == tile ? 16 : 0);
}

// Few queries: blocks form the weights of a tile each, once the maxima of the tiles before it are
// known; then others sum values, each of a slice of the columns, through all tiles in the order in
// which one block alone would.
inline constexpr int slice_columns = 16;                                   // of each warpgroup
inline constexpr int64_t slice_bytes = 2 * 2 * slice_columns * tile_keys;  // of a tile
// A pair's weights as tiles of shared memory, and behind them of both tiles: the sums of the
// weights that each thread formed of its two rows; what the rows' weights are relative to; flags of
// each warp; and of each row the largest score up to here.
inline constexpr int weight_parts_at = 2 * chunk_bytes;
inline constexpr int weight_references_at = weight_parts_at + 2 * 8 * 128;
inline constexpr int weight_flags_at = weight_references_at + 2 * 4 * tile_heads;
inline constexpr int weight_top_at = weight_flags_at + 256;
inline constexpr int weighed_bytes = weight_top_at + 4 * tile_heads;
inline constexpr uint32_t flag_moved = 1, flag_seen = 2;  // a reference; a valid slot
// Packed rows: a block scores one tile for two tiles of heads. q of both, the keys, a bit a key.
inline constexpr int packed_columns = most_columns / chunk_columns;  // chunks
inline constexpr int packed_tile_bytes = packed_columns * chunk_bytes;
inline constexpr int64_t packed_scores_bytes = 3 * packed_tile_bytes + 16;
inline constexpr int stored_stages = 8;
inline constexpr int stored_stage_bytes = weighed_bytes + 2 * static_cast<int>(slice_bytes);
static_assert(stored_stage_bytes % 1024 == 0 && weighed_bytes % 256 == 0);  // swizzles
inline constexpr int slice_cluster = 2;  // blocks of neighbouring slices load their weights once

struct StoredBeside {
  Beside beside;
  uint64_t full[stored_stages], empty[stored_stages];
};
constexpr int64_t stored_shared_bytes() {
  return int64_t{stored_stages} * stored_stage_bytes + int64_t{sizeof(StoredBeside)};
}

struct Stored {
  int* written = nullptr;    // [list]: warpgroups that have written their share of a tile
  float* most = nullptr;     // [list, head tile, tile of keys][32][2]: largest of rows r and r + 8
  char* weighed = nullptr;   // [list, head tile, pair of tiles]
  char* values = nullptr;    // [list, slice, tile of keys, warpgroup][64 keys, 16 columns]
  int writers = 0;           // of a pair of tiles
  int64_t tiles = 0;         // of keys, of a list
  int slices = 0, half = 0;  // columns of a warpgroup: half, and slices of them
};

struct Forward {
  cuda::Tables tables;
  View q, kv, sink, o, o_residual, lse, row_max;
  cuda::Counters* counters = nullptr;  // null: not counted
  float scale = 1;
  int64_t dim = 0, value_dim = 0;
  int64_t heads = 0, head_begin = 0, group_heads = 0;  // group_heads: of all ranks
  int64_t head_tiles = 0, work = 0;
  int64_t segments = 1;  // of a list: a pair of tiles each, where there are several
  Stored stored;
  Rows rows = Rows::plain;
  bool o_words = false, residual_words = false;  // 16 bits, rows of whole 16-byte words
  const char* rows_from = nullptr;               // of narrow rows: kv, or q where kv has no rows
};

void launch_bf16(const Forward& f, int half, unsigned blocks, cudaStream_t stream);
void launch_f16(const Forward& f, int half, unsigned blocks, cudaStream_t stream);

void launch_narrow_bf16(const Forward& f, unsigned blocks, cudaStream_t stream);
void launch_narrow_f16(const Forward& f, unsigned blocks, cudaStream_t stream);

void launch_few_heads_bf16(const Forward& f, unsigned blocks, cudaStream_t stream);
void launch_few_heads_f16(const Forward& f, unsigned blocks, cudaStream_t stream);

// Nothing known, weights into the workspace, then values: `f.segments` and `f.stored` say how.
void launch_unknown(const Forward& f, cudaStream_t stream);
void launch_packed_scores_bf16(const Forward& f, unsigned blocks, cudaStream_t stream);
void launch_scores_bf16(const Forward& f, int half, unsigned blocks, cudaStream_t stream);
void launch_scores_f16(const Forward& f, int half, unsigned blocks, cudaStream_t stream);
void launch_values_bf16(const Forward& f, cudaStream_t stream);
void launch_values_f16(const Forward& f, cudaStream_t stream);

}  // namespace talea::sparse_attention::sm90
