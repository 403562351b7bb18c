// What: every pair of options of sparse attention, drawn, on every lane, against fp64.
// Why: section 2 of the contract times storage, spaces and outputs; bugs live where two meet.
// Never: passes with fewer cases than the pairs need.
#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {
namespace {

class AttentionDrawn : public AttentionLane {};
TALEA_ATTENTION_LANES(AttentionDrawn);

class AttentionPairs : public AttentionLane {
 protected:
  void every_pair(uint64_t seed) {
    const std::vector<Spec> specs = pairwise(seed);
    EXPECT_GT(specs.size(), 60u);
    for (const Spec& s : specs) expect_right(make(s), describe(s));
  }
};
TALEA_ATTENTION_LANES(AttentionPairs);

TEST_P(AttentionPairs, OfOptions) { every_pair(1); }
TEST_P(AttentionPairs, OfOptionsAgain) { every_pair(2); }
TEST_P(AttentionPairs, OfOptionsOnceMore) { every_pair(3); }
TEST_P(AttentionPairs, OfOptionsAndAgain) { every_pair(4); }

TEST_P(AttentionDrawn, OddDimensions) {
  uint64_t seed = 1;
  for (const auto& [dim, value] : {std::pair<int64_t, int64_t>{1, 1}, {7, 3}, {33, 33}, {130, 65}})
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      Spec s;
      s.seed = ++seed, s.dim = dim, s.value_dim = value, s.dtype = dtype;
      s.heads = 5, s.slots = 21, s.sink = s.d_lse = true;
      expect_right(make(s), describe(s));
    }
}

TEST_P(AttentionDrawn, Fp64) {
  Spec s;
  s.dtype = DType::f64, s.sink = s.d_lse = s.topk_length = true;
  const Case c = make(s);
  expect_right(c);
  if (lane() != "reference") {
    EXPECT_FALSE(accepts(c));
    ++runs_;
  }
}

// Whole tiles and rests of heads and keys at the sizes that models have: more tiles of heads than
// one, many of keys, an odd number, a rest in the last.
class AttentionLarge : public AttentionLane {};
TALEA_ATTENTION_ON(AttentionLarge, device_attention_lanes);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionLarge);

TEST_P(AttentionLarge, ModelSizes) {
  struct Size {
    int64_t dim, value, heads, slots, keys;
  };
  uint64_t seed = 40;
  for (const Size& n : {Size{576, 512, 128, 2048, 4096},
                        {512, 512, 128, 1985, 2100},
                        {576, 512, 66, 330, 4096},
                        {128, 64, 128, 256, 512},
                        {192, 128, 32, 512, 700},
                        {288, 256, 48, 513, 600}})
    for (const DType dtype : {DType::bf16, DType::f16}) {
      Spec s;
      s.seed = ++seed, s.queries = n.slots > 1000 ? 2 : 5;
      s.dim = n.dim, s.value_dim = n.value, s.heads = n.heads, s.slots = n.slots, s.keys = n.keys;
      s.dtype = dtype, s.sink = true, s.backward = false;
      s.topk_length = s.causal = seed % 2;
      expect_right(make(s), describe(s));
    }
}

}  // namespace
}  // namespace talea::testing
