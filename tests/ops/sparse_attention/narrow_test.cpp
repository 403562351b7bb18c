// What: rows of up to 320 columns beside lists of several pairs of tiles, for which a device lane may
//       have kernels of its own: every option at the sizes that they take, and their bits.
// Why: a pair of tiles is copied while another is multiplied: lists of one or two show no third.
// Never: needs a yardstick where the same heads among more have the same bits.
#include <cmath>

#include "ops/sparse_attention/heads.hpp"

namespace talea::testing {
namespace {

class AttentionNarrow : public AttentionHeads {};
INSTANTIATE_TEST_SUITE_P(Lanes, AttentionNarrow, ::testing::ValuesIn(tensor_core_lanes()),
                         [](const auto& info) { return info.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionNarrow);

Spec narrow(uint64_t seed, int64_t dim, int64_t value) {
  Spec s;
  s.seed = seed;
  s.dtype = seed % 2 ? DType::bf16 : DType::f16;
  s.dim = dim, s.value_dim = value;
  s.queries = 3, s.keys = 400;
  s.sink = true, s.backward = false;
  return s;
}

// One, two and three chunks of columns, the last whole or not, one and two of values; those of two
// warpgroups behind them.
constexpr int64_t sizes[][2] = {{128, 64}, {192, 128}, {96, 64},   {64, 64},  {160, 96},
                                {80, 80},  {32, 16},   {288, 256}, {208, 128}};

// Lists end in either half of a pair and at its ends; heads on both sides of 32 and of 64.
TEST_P(AttentionNarrow, EveryOption) {
  constexpr int64_t heads[] = {28, 64, 33, 5, 130, 32, 66};
  constexpr int64_t slots[] = {320, 513, 257, 384, 449, 130};
  for (uint64_t i = 0; i < 45; ++i) {
    Spec s = narrow(100 + i, sizes[i % 9][0], sizes[i % 9][1]);
    s.heads = heads[i % 7], s.slots = slots[(i + i / 9) % 6];
    s.sink = i % 3 != 0, s.topk_length = i % 5 == 1;
    s.thd = i % 8 == 2, s.paged = i % 8 == 4;
    s.causal = i % 4 == 1, s.positions = s.causal && i % 8 == 1;
    if (s.paged || (s.thd && i % 16 == 2)) s.space = sa::IndexSpace::sequence;
    if (i % 8 == 5) s.space = sa::IndexSpace::slots, s.causal = s.positions = false;
    choose_rest(s, i);
    expect_right(whole_lists(s), describe(s));
  }
}

// More queries than a device has multiprocessors, lists of uneven lengths; logits that make the
// maxima grow along a list. Up to 32 heads have fewer rows a thread.
TEST_P(AttentionNarrow, BitsOfTheSameHeadsAmongMore) {
  uint64_t seed = 200;
  for (const auto& [dim, value] : sizes)
    for (const double spread : {1.0, 40.0}) {
      Spec s = narrow(++seed, dim, value);
      s.heads = 44, s.queries = 300, s.slots = 300 + static_cast<int64_t>(seed % 5) * 30;
      s.topk_length = seed % 3 != 0, s.spread = spread;
      s.causal = seed % 4 == 1, s.residual = seed % 4 == 2, s.wide_outputs = seed % 8 == 3;
      expect_same_bits(make(s), 7, describe(s));
    }
}

TEST_P(AttentionNarrow, TilesWithoutAValidSlot) {
  uint64_t seed = 300;
  for (const auto& [dim, value] : sizes) {
    Spec s = narrow(++seed, dim, value);
    s.queries = 7, s.heads = 36, s.slots = 500, s.foreign = false;
    Case c = whole_lists(s);
    leave_out(c);
    expect_same_bits(c, 16, describe(s));
    expect_right(c, describe(s));
  }
}

TEST_P(AttentionNarrow, WhatIsNoNumberStaysWhereItBelongs) {
  uint64_t seed = 400;
  for (const auto& [dim, value] : sizes)
    for (const double odd : {static_cast<double>(NAN), HUGE_VAL, -HUGE_VAL})
      for (const int64_t column : {int64_t{3}, value - 1, dim - 1}) {
        Spec s = narrow(++seed, dim, value);
        s.queries = 9, s.heads = 40, s.slots = 300;
        Case c = whole_lists(s);
        for (const int64_t key : {0, 77, 301}) c.kv.put(odd, 0, key, 0, column);
        expect_same_bits(c, 13, describe(s));
      }
}

// A block of two warpgroups goes on from list to list, whose pairs of tiles take turns in its ring.
TEST_P(AttentionNarrow, ListsInTurn) {
  for (const uint64_t seed : {501, 502}) {
    Spec s = narrow(seed, 288, 256);
    s.heads = 2, s.queries = 600, s.slots = 300, s.topk_length = true;
    expect_right(make(s), describe(s));
  }
}

}  // namespace
}  // namespace talea::testing
