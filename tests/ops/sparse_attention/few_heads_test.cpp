// What: up to 16 heads beside wide values, for which a device lane may have a kernel of its own: every
//       option at the sizes that it takes, and its bits.
// Why: keys are the rows of its products, and its ring of keys is longer than the lists of other tests.
// Never: needs a yardstick where the same heads among more have the same bits.
#include <cmath>

#include "ops/sparse_attention/heads.hpp"

namespace talea::testing {
namespace {

class AttentionFewHeads : public AttentionHeads {};
INSTANTIATE_TEST_SUITE_P(Lanes, AttentionFewHeads, ::testing::ValuesIn(tensor_core_lanes()),
                         [](const auto& info) { return info.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionFewHeads);

Spec wide(uint64_t seed) {
  Spec s;
  s.seed = seed;
  s.dtype = seed % 2 ? DType::bf16 : DType::f16;
  s.dim = 576, s.value_dim = 512, s.heads = 16;
  s.keys = 900, s.slots = 700;
  s.sink = true, s.backward = false;
  return s;
}

TEST_P(AttentionFewHeads, EveryOption) {
  constexpr int64_t dims[][2] = {{576, 512}, {512, 512}, {528, 496}, {320, 272}};
  constexpr int64_t heads[] = {1, 8, 11, 16}, slots[] = {700, 1, 63, 129, 385, 64, 513};
  for (uint64_t i = 0; i < 28; ++i) {
    Spec s = wide(100 + i);
    s.dim = dims[i % 4][0], s.value_dim = dims[i % 4][1];
    s.heads = heads[i / 4 % 4], s.slots = slots[i % 7];
    s.sink = i % 3 != 0, s.topk_length = i % 5 == 1;
    s.thd = i % 7 == 2, s.paged = i % 7 == 4;
    s.causal = i % 4 == 1, s.positions = s.causal && i % 8 == 1 && !s.thd;
    if (s.paged || (s.thd && i % 2)) s.space = sa::IndexSpace::sequence;
    if (i % 7 == 5) s.space = sa::IndexSpace::slots, s.causal = s.positions = false;
    choose_rest(s, i);
    expect_right(whole_lists(s), describe(s));
  }
}

TEST_P(AttentionFewHeads, ModelSizes) {
  for (const int64_t heads : {8, 16}) {
    Spec s = wide(static_cast<uint64_t>(heads) + heads / 16);
    s.heads = heads, s.queries = 6, s.keys = 4096, s.slots = 2048;
    s.topk_length = s.causal = heads == 8;
    expect_right(whole_lists(s), describe(s));
  }
}

// More queries than a device has multiprocessors, lists of uneven lengths; logits that make the
// maxima grow along a list.
TEST_P(AttentionFewHeads, BitsOfTheSameHeadsAmongMore) {
  uint64_t seed = 200;
  for (const int64_t heads : {16, 8, 1, 5})
    for (const double spread : {1.0, 6.0, 40.0}) {
      Spec s = wide(++seed);
      s.heads = heads + 20, s.queries = 400, s.slots = 40 + 61 * heads;
      s.topk_length = true, s.spread = spread;
      s.causal = heads == 5, s.residual = heads == 8, s.wide_outputs = heads == 1;
      if (heads == 8) s.dim = 512;
      if (heads == 5) s.dim = 320, s.value_dim = 272;
      expect_same_bits(make(s), heads, describe(s));
    }
}

TEST_P(AttentionFewHeads, TilesWithoutAValidSlot) {
  for (const uint64_t seed : {301, 302}) {
    Spec s = wide(seed);
    s.queries = 7, s.heads = 36, s.foreign = false;
    Case c = whole_lists(s);
    leave_out(c);
    expect_same_bits(c, 16, describe(s));
    expect_right(first_heads(c, 16), describe(s));
  }
}

TEST_P(AttentionFewHeads, WhatIsNoNumberStaysWhereItBelongs) {
  for (const uint64_t seed : {401, 402})
    for (const double odd : {static_cast<double>(NAN), HUGE_VAL, -HUGE_VAL})
      for (const int64_t column : {3, 300, 520, 575}) {
        Spec s = wide(seed);
        s.queries = 9, s.heads = 30, s.slots = 300, s.keys = 700;
        Case c = whole_lists(s);
        for (const int64_t key : {0, 77, 401}) c.kv.put(odd, 0, key, 0, column);
        expect_same_bits(c, 13, describe(s));
      }
}

}  // namespace
}  // namespace talea::testing
