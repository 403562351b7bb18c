// What: a chunk of rows and where its rows lie in the buffers.
// Why: the steps of a chunk read as steps.
// Never: launches anything.
#pragma once
#include "ops/linear_cross_entropy/sm90/run.hpp"

namespace talea::lce::sm90 {

inline bool is_last(const Run& r, int64_t begin) { return begin + r.c.chunk_rows >= r.p.tokens; }
// Whether the logits of the chunk after this one run beside its gradient products.
inline bool is_followed(const Run& r, int64_t begin) {
  return r.c.runs_ahead() && !is_last(r, begin);
}

// A chunk of rows, or a part of one whose states are formed at once.
struct Chunk {
  int64_t begin = 0, capacity = 0;
  int64_t offset = 0;  // of its first row in the chunk's buffers
  ChunkRows rows;
  RowRange range;  // the buffers' extent
};

inline Chunk rows_of(const Run& r, int64_t begin, int64_t offset, int64_t extent,
                     int64_t capacity) {
  Chunk k;
  k.begin = begin + offset, k.offset = offset, k.capacity = capacity;
  k.rows = {static_cast<int>(k.begin), static_cast<int>(capacity), &r.b.facts->in_use};
  k.range = r.range(k.begin, extent);
  return k;
}

// The gathered rows of a chunk or a part of it.
inline Matrix x_of(const Run& r, const Chunk& k) {
  Matrix x = r.x(k.begin - k.offset);
  x.data = static_cast<uint16_t*>(x.data) + k.offset * x.stride;
  x.rows = r.c.x_ends_dx() ? x.rows - k.offset : k.range.rows;
  return x;
}

// A second term lies behind the fp32 logits of its row.
inline Matrix buffer(const Run& r, const Chunk& k) {
  const int64_t columns = r.c.two_terms ? r.c.exp_stride : r.p.vocab_local;
  return {r.b.exp + k.offset * r.c.exp_stride, k.range.rows, columns, r.c.exp_stride};
}

inline Terms terms(const Run& r) {
  if (!r.c.two_terms) return {};
  return {2, static_cast<int>(r.c.exp_stride / 3 * 2)};
}

}  // namespace talea::lce::sm90
