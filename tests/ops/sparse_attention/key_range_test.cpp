// What: a range of indices against the rule of section 1, index by index.
// Why: kernels that copy rows ask the range; everything else asks the rule.
// Never: needs a device.
#include "ops/sparse_attention/key_range.hpp"

#include <gtest/gtest.h>

namespace talea::sparse_attention {
namespace {

void compare(const KeyRule& rule, const QueryRule& query) {
  const KeyRange range = key_range(rule, query);
  if (!range.known) return;
  for (int64_t index = -3; index < rule.keys + 3; ++index) {
    const KeyRow found = find_key(rule, query, 0, index);
    const bool inside = index >= range.low && index < range.high;
    ASSERT_EQ(inside, found.kind == SlotKind::valid)
        << "index " << index << " of [" << query.first << ", " << query.last << ")";
    if (!inside) continue;
    EXPECT_EQ(found.outer, query.batch);
    EXPECT_EQ(found.inner, index + range.shift);
  }
}

TEST(AttentionKeyRange, IsTheRule) {
  for (const IndexSpace space : {IndexSpace::rows, IndexSpace::sequence})
    for (const bool causal : {false, true})
      for (int64_t first = 0; first <= 9; first += 3)
        for (int64_t last = first; last <= 9; last += 2)
          for (const int64_t position :
               {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{4}, INT64_MAX}) {
            KeyRule rule;
            rule.space = space;
            rule.causal = causal;
            rule.keys = 9;
            QueryRule query;
            query.batch = 2;
            query.slots = 1;
            query.first = first;
            query.last = last;
            query.position = position;
            compare(rule, query);
          }
}

TEST(AttentionKeyRange, TablesAndSlotsAskTheRule) {
  KeyRule rule;
  rule.space = IndexSpace::slots;
  EXPECT_FALSE(key_range(rule, {}).known);
  rule.space = IndexSpace::sequence;
  rule.paged = true;
  EXPECT_FALSE(key_range(rule, {}).known);
}

}  // namespace
}  // namespace talea::sparse_attention
