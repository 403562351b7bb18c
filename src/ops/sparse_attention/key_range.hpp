// What: the rule of rule.hpp as a range of indices, where rows need no table.
// Why: a kernel that copies rows asks two comparisons of an index.
// Never: differs from find_key: a test compares them.
#pragma once

#include "ops/sparse_attention/rule.hpp"

namespace talea::sparse_attention {

// Below the query's slots an index is valid where low <= index < high, and names row index + shift
// of the query's batch entry. Not known: ask find_key. Planted bugs are of find_key alone.
struct KeyRange {
  bool known = false;
  int64_t low = 0, high = 0, shift = 0;
};

TALEA_RULE KeyRange key_range([[maybe_unused]] const KeyRule& rule,
                              [[maybe_unused]] const QueryRule& query) {
#ifdef TALEA_MUTANTS
  return {};
#else
  if (rule.paged || rule.space == IndexSpace::slots) return {};
  const bool rows = rule.space == IndexSpace::rows;
  int64_t last = rows && query.last > rule.keys ? rule.keys : query.last;
  if (rule.causal && query.position < last - query.first) last = query.first + query.position + 1;
  if (rows) return {true, query.first, last, 0};
  return {true, 0, last - query.first, query.first};
#endif
}

}  // namespace talea::sparse_attention
