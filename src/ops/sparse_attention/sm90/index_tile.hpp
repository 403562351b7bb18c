// What: the tiles of lane sm90's index scores, and the plain value that their kernel gets.
// Why: host and kernel lay out shared memory by one function.
// Never: holds a rule of selection.
#pragma once

#include <cuda.h>

#include "ops/sparse_attention/foreign.cuh"

namespace talea::sparse_attention::sm90 {

// A warpgroup multiplies tiles of 64 keys with 256 rows of index_q: 4, 8 or 16 queries of 64, 32 or
// 16 heads. Two warpgroups read the same keys.
inline constexpr int index_keys = 64, index_rows = 256, index_groups = 2;
inline constexpr int index_stages = 5;
inline constexpr int index_threads = 128 * (index_groups + 1);
inline constexpr int index_chunk_columns = 64;  // 128 bytes of 16 bits, swizzled; all of e4m3
inline constexpr int most_index_columns = 128, most_index_heads = 64;  // of one launch

enum class IndexType { bf16, f16, e4m3 };

constexpr int index_chunks(int64_t dim, bool e4m3) {
  return e4m3 || dim <= index_chunk_columns ? 1 : 2;
}
constexpr int queries_of(int heads) { return index_groups * (index_rows / heads); }

struct IndexBeside {
  uint64_t full[index_stages], empty[index_stages];
  int64_t first, last;  // keys that a query of the block may see
  alignas(16) float weights[index_groups][index_rows];
};
constexpr int64_t index_shared_bytes(int chunks) {
  return int64_t{128} * chunks * (index_groups * index_rows + index_stages * index_keys) +
         int64_t{sizeof(IndexBeside)};
}

// Scores of queries [s, s + n) of batch entry b and heads [head, head + heads) of them.
struct IndexScores {
  cuda::IndexTables tables;
  View q;
  float* scores = nullptr;  // [n, stride]: only keys that the query may see are written
  int64_t stride = 0;
  int64_t b = 0, s = 0, n = 0, keys = 0;
  int64_t head = 0, dim = 0;
  int heads = 0, chunks = 1;
  int64_t unit_keys = 0, query_blocks = 0;  // of a block; units go through the blocks first
  float floor = 0;                          // ReLU: 0; identity: -Inf
  bool adds = false, last = true;           // to earlier heads; whether none come after
};

using LaunchIndex = void(const IndexScores& f, int heads, int64_t units, const CUtensorMap& keys,
                         cudaStream_t stream);
LaunchIndex launch_index_bf16, launch_index_f16, launch_index_e4m3;

// Keys of e4m3 in rows that TMA takes: [keys, dim] of batch entry b, `pitch` bytes apart.
void pack_index_keys(const View& keys, int64_t b, int64_t rows, int64_t dim, int64_t pitch,
                     void* to, cudaStream_t stream);

}  // namespace talea::sparse_attention::sm90
