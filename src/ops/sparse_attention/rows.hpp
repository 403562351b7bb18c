// What: one row of kv, q or an indexer's matrix as numbers, whatever its storage.
// Why: what an e4m3 byte and its scale mean is said once for the host lanes.
// Never: reads a row that no valid slot names.
#pragma once

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// The valid slots of a query's list, in order of slots.
struct ValidSlot {
  int64_t slot = 0;
  KeyRow row;
};
template <typename Slots>
void valid_slots(const Problem& p, const Args& a, int64_t b, int64_t s, int64_t g, Slots& to) {
  to.clear();
  const KeyRule rule = key_rule(p);
  const QueryRule query = query_rule(p, a, b, s);
  for (int64_t k = 0; k < query.slots; ++k) {
    const KeyRow row = find_key(rule, query, k, a.indices.integer(b, list_of(s), g, k));
    if (row.kind == SlotKind::valid) to.push_back({k, row});
  }
}

// Exact in double for every storage.
void load_key(const Problem& p, const Args& a, const KeyRow& row, int64_t g, double* to);
void load_query(const Problem& p, const Args& a, int64_t b, int64_t s, int64_t h, double* to);
void load_vector(const View& v, int64_t element, int64_t n, double* to);  // contiguous

// Logit of one key of the indexer for the products z_h = index_q . index_k, heads ascending; its
// scales included.
double index_logit(const Problem& p, const Args& a, int64_t b, int64_t s, int64_t j,
                   const double* z);

}  // namespace talea::sparse_attention
