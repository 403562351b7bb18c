// What: the selection of the best keys of rows of scores on a device.
// Why: every CUDA lane selects by one kernel, whatever formed the scores.
// Never: allocates or synchronises.
#pragma once

#include <cstdint>

#include "ops/sparse_attention/foreign.cuh"

namespace talea::sparse_attention::cuda {

// Queries [s, s + n) of batch entry b: of each the min(top_k, candidates) keys that come first,
// ascending by key, then -1 and -Inf. Of a row of scores, `stride` apart, what lies outside the
// query's bounds is not a key.
struct Selected {
  IndexTables tables;
  int64_t b = 0, s = 0, n = 0;
  int64_t stride = 0, top_k = 0;
  int64_t most_keys = INT64_MAX;  // no query's bounds hold more
  View indices, length, scores;   // outputs, each may be absent
};
void select_top(const Selected& selected, const float* scores, Counters* counters,
                cudaStream_t stream);

}  // namespace talea::sparse_attention::cuda
