// What: rows of 3-d hidden views and the order of tokens under sequence parallelism.
// Why: in [B, S, D] the tokens of a rank are no block of the whole tensor.
// Never: runs the operator.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "talea/error.hpp"
#include "talea/ranks.hpp"

namespace talea {
namespace {

TEST(Layout, RowsOfAThreeDimensionalView) {
  std::vector<float> data(2 * 3 * 4);
  Tensor t = make_tensor(data.data(), DType::f32, {2, 3, 4});
  const Tensor rows = rows_of(t);
  EXPECT_EQ(rows.rank, 2);
  EXPECT_EQ(rows.shape[0], 6);
  EXPECT_EQ(rows.stride[0], 4);
  std::swap(t.shape[0], t.shape[1]);
  std::swap(t.stride[0], t.stride[1]);
  EXPECT_THROW(rows_of(t), Error);
}

TEST(Layout, OrderUnderSequenceParallelism) {
  // [B = 2, S = 4] over two ranks: rank 0 holds s 0, 1 of both sequences.
  EXPECT_EQ(sequence_parallel_order(HiddenLayout::batch_first, 4, 2, 2),
            (std::vector<int64_t>{0, 1, 4, 5, 2, 3, 6, 7}));
  EXPECT_EQ(sequence_parallel_order(HiddenLayout::sequence_first, 4, 2, 2),
            (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_THROW(sequence_parallel_order(HiddenLayout::batch_first, 5, 2, 2), Error);
}

TEST(Layout, EvenShardsCoverTheVocabulary) {
  for (int64_t total : {1, 7, 100})
    for (int ranks : {1, 3, 8}) {
      EXPECT_EQ(even_shard_begin(total, ranks, 0), 0);
      EXPECT_EQ(even_shard_begin(total, ranks, ranks), total);
      for (int r = 0; r < ranks; ++r)
        EXPECT_LE(even_shard_begin(total, ranks, r), even_shard_begin(total, ranks, r + 1));
    }
}

TEST(Layout, CommonFactorNeedsEveryElement) {
  const float truth[] = {1, -2, 3}, eight[] = {8, -16, 24}, other[] = {8, -16, 25};
  EXPECT_NEAR(common_factor(eight, truth, 3), 8, 1e-6);
  EXPECT_EQ(common_factor(other, truth, 3), 0);
}

}  // namespace
}  // namespace talea
