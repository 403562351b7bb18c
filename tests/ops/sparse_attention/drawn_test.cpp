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
    for (const Spec& s : specs) expect_right(make_case(s), describe(s));
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
      expect_right(make_case(s), describe(s));
    }
}

TEST_P(AttentionDrawn, Fp64) {
  Spec s;
  s.dtype = DType::f64, s.sink = s.d_lse = s.topk_length = true;
  const Case c = make_case(s);
  expect_right(c);
  if (lane() != "reference") {
    EXPECT_FALSE(accepts(c));
    ++runs_;
  }
}

}  // namespace
}  // namespace talea::testing
