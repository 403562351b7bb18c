// What: which slot of an index list is valid, and which row of kv it names.
// Why: one function for every lane, host or device: section 1 of the contract in code.
// Never: clamps an index, reads a tensor of keys, or looks at a slot's place beyond topk_length.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/sparse_attention/mutants.hpp"
#include "talea/sparse_attention.hpp"

#if defined(__CUDACC__)
#define TALEA_RULE __host__ __device__ inline
#elif defined(TALEA_MUTANTS)
#define TALEA_RULE inline
#else
#define TALEA_RULE constexpr
#endif

namespace talea::sparse_attention {

enum class SlotKind : int32_t { valid = 0, absent = 1, foreign = 2 };

// A row of kv as it is stored: of a batch entry, or of a page.
struct KeyRow {
  SlotKind kind = SlotKind::absent;
  int64_t outer = 0;  // batch entry or page
  int64_t inner = 0;  // row within it
};

// What the whole call shares.
struct KeyRule {
  IndexSpace space = IndexSpace::rows;
  bool causal = false;
  bool sequences = false;  // cu_seqlens
  bool paged = false;      // block table
  int64_t keys = 0;        // rows of a batch entry, or of the whole tensor
  int64_t pages = 0, page_rows = 1;
};

// What one query brings.
struct QueryRule {
  int64_t batch = 0;
  int64_t slots = 0;     // slots at and behind it are absent
  int64_t first = 0;     // its own sequence: rows [first, last) of kv
  int64_t last = 0;      // paged: last - first is the length of the sequence
  int64_t position = 0;  // within its sequence, for causal
  const int32_t* table = nullptr;
  int64_t table_stride = 1;
};

TALEA_RULE KeyRow find_key(const KeyRule& rule, const QueryRule& query, int64_t slot,
                           int64_t index) {
  if (slot >= query.slots) return {SlotKind::absent, 0, 0};
  if (mutant(Mutant::sa7_slot_against_keys) && slot >= rule.keys) return {SlotKind::absent, 0, 0};
  if (index == -1) {
    if (!mutant(Mutant::sa1_filler_read_as_a_key) || rule.keys == 0)
      return {SlotKind::absent, 0, 0};
    index = 0;
  }
  if (mutant(Mutant::sa2_no_upper_bound) && index >= rule.keys && rule.keys > 0)
    index = rule.keys - 1;
  if (rule.space == IndexSpace::slots) {
    if (index < 0 || index >= rule.pages * rule.page_rows) return {SlotKind::foreign, 0, 0};
    return {SlotKind::valid, index / rule.page_rows, index % rule.page_rows};
  }
  int64_t position = index;
  if (rule.space == IndexSpace::rows) {
    if (index < 0 || index >= rule.keys) return {SlotKind::foreign, 0, 0};
    if (index < query.first || index >= query.last) return {SlotKind::absent, 0, 0};
    position = index - query.first;
  } else if (mutant(Mutant::sa9_index_into_the_next_sequence) && !rule.paged
                 ? index < 0 || query.first + index >= rule.keys
                 : index < 0 || index >= query.last - query.first) {
    return {SlotKind::foreign, 0, 0};
  }
  int64_t page = 0;
  if (rule.paged) {
    page = query.table[position / rule.page_rows * query.table_stride];
    if (page < 0 || page >= rule.pages) return {SlotKind::foreign, 0, 0};
  }
  if (rule.causal && position > query.position) return {SlotKind::absent, 0, 0};
  if (rule.paged) return {SlotKind::valid, page, position % rule.page_rows};
  return {SlotKind::valid, query.batch, query.first + position};
}

// Whether an lse that backward is given is that of the row itself, rounded to fp32. A merged one
// lies elsewhere, by what other parts weigh.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline bool
    is_own(double given, double max, double sum) {
  const double own = max + std::log(sum);
  return std::fabs(given - own) <= 0x1p-23 * std::fabs(own);
}

}  // namespace talea::sparse_attention
