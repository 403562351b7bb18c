// What: what a query brings to the rule of section 1, read from host tensors.
// Why: sequences, positions, lengths and bounds mean the same in every host lane.
// Never: reads an index list or a key.
#include "ops/sparse_attention/args.hpp"

#include <algorithm>

#include "ops/sparse_attention/mutants.hpp"

namespace talea::sparse_attention {
namespace {

// A query's own sequence, and its number within it. Without one: rows [0, 0).
struct Place {
  int64_t first = 0, last = 0, number = 0;
};

Place place_of(const Problem& p, const Args& a, int64_t s) {
  int64_t low = 0, high = p.sequences;  // the last sequence that begins at or before s
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.cu_seqlens_q.integer(middle) <= s)
      low = middle + 1;
    else
      high = middle;
  }
  const int64_t i = low - 1;
  if (i < 0 || s >= a.cu_seqlens_q.integer(i + 1)) return {};
  return {a.cu_seqlens_k.integer(i), a.cu_seqlens_k.integer(i + 1), s - a.cu_seqlens_q.integer(i)};
}

int64_t floor_of(int64_t x, int64_t by) { return x >= 0 ? x / by : -((-x + by - 1) / by); }

}  // namespace

KeyRule key_rule(const Problem& p) {
  KeyRule rule;
  rule.space = p.options.index_space;
  rule.causal = p.options.causal;
  rule.sequences = p.sequences > 0;
  rule.paged = p.has_block_table;
  rule.keys = p.keys;
  rule.pages = p.page_rows > 0 ? p.pages : 0;  // a page without rows holds nothing
  rule.page_rows = std::max<int64_t>(p.page_rows, 1);
  return rule;
}

QueryRule query_rule(const Problem& p, const Args& a, int64_t b, int64_t s) {
  QueryRule q;
  q.batch = b;
  q.slots = p.slots;
  if (a.topk_length && !mutant(Mutant::sa34_length_ignored)) {
    const int64_t given = a.topk_length.integer(b, s);
    q.slots = std::clamp<int64_t>(given, 0, p.slots);
    if (given < 0 && mutant(Mutant::sa5_length_not_cut)) q.slots = p.slots;
  }
  q.last = p.keys;
  int64_t number = s;
  if (p.sequences > 0) {
    const Place place = place_of(p, a, s);
    q.first = place.first;
    q.last = place.last;
    number = place.number;
  } else if (p.has_block_table) {
    q.last = std::clamp<int64_t>(a.kv_lengths.integer(b), 0, p.keys);
    q.table = static_cast<const int32_t*>(a.block_table.data) + a.block_table.at(b);
    q.table_stride = a.block_table.stride[1];
  }
  const bool told = a.q_positions && !mutant(Mutant::sa36_causal_by_row_number);
  q.position = told ? a.q_positions.integer(b, s) : p.options.q_position_base + number;
  return q;
}

Bounds index_bounds(const Problem& p, const Args& a, int64_t b, int64_t s) {
  Bounds own = {0, p.keys};
  int64_t number = s;
  if (p.sequences > 0) {
    const Place place = place_of(p, a, s);
    own = {place.first, place.last};
    number = place.number;
  }
  Bounds cut = own;
  if (a.begin) cut.begin = std::max(cut.begin, a.begin.integer(b, s));
  if (a.end) cut.end = std::min(cut.end, a.end.integer(b, s));
  if (p.options.causal) {
    const int64_t position =
        a.q_positions ? a.q_positions.integer(b, s) : p.options.q_position_base + number;
    cut.end = std::min(cut.end, own.begin + floor_of(position + 1, p.key_stride));
  }
  if (cut.begin > cut.end) return {own.begin, own.begin};
  return cut;
}

}  // namespace talea::sparse_attention
