// What: the room that the judge of sparse attention leaves for sums that tensor cores cut off.
// Why: a derived term that cannot fail would hide errors of its size.
// Never: needs a device.
#include "yardsticks/sparse_attention/judge.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace talea::yardsticks::sparse_attention {
namespace {

// The truth of a case, as a lane of a device could have written it.
Outcome right(const Case& c) {
  const Numbers exact = truth(c);
  Outcome o;
  o.o = exact.o, o.lse = exact.lse, o.row_max = exact.row_max;
  o.forward.slots_valid = -1;
  o.forward.slots_foreign = exact.foreign, o.forward.first_foreign_slot = exact.first_foreign;
  o.on_device = true;
  return o;
}

Case of_columns(int64_t dim, DType dtype) {
  Spec s;
  s.dim = dim, s.value_dim = 16, s.dtype = dtype, s.backward = false, s.spread = 40;
  return make_case(s);
}

TEST(SparseAttentionJudge, CutSumsAreNoLicence) {
  const double before = used_of_cut_sums;
  const Case c = of_columns(576, DType::bf16);
  const double largest = truth(c).largest_logit;
  const double room = room_of_cut_sums(576, largest);
  EXPECT_DOUBLE_EQ(room, 36 * 0x1p-23 * largest);
  for (const auto rows : {&Outcome::lse, &Outcome::row_max}) {
    Outcome o = right(c);
    ASSERT_EQ(judge(c, o), "");
    const double exact = (o.*rows)[3];
    (o.*rows)[3] = exact - 0.99 * room;
    EXPECT_EQ(judge(c, o), "");
    (o.*rows)[3] = exact - 1.01 * room;  // just beyond
    EXPECT_NE(judge(c, o), "");
    (o.*rows)[3] = exact - 0.99 * room;
    o.on_device = false;  // a host sums in fp32
    EXPECT_NE(judge(c, o), "");
  }
  EXPECT_NEAR(used_of_cut_sums, 1.01, 1e-6);
  used_of_cut_sums = before;  // what this test plants is no lane's need
}

// One key has all the weight: dq is 0, of terms that cancel, and an error has the size of those.
TEST(SparseAttentionJudge, AGradientOfNothingIsMeasuredByItsTerms) {
  const std::vector<double> zeros(10000, 0.0);
  for (const double term : {0.01, 10.0})
    for (const double share : {0.9e-4, 1.1e-4}) {
      const std::vector<double> ours(zeros.size(), share * term);
      const Compared t = {.name = "dq",
                          .ours = &ours,
                          .truth = &zeros,
                          .yardstick = &zeros,
                          .row = 100,
                          .dtype = DType::bf16,
                          .term = term};
      EXPECT_EQ(compare(t).empty(), share < 1e-4) << term;
      Compared without = t;  // a lane that sums both alike leaves nothing
      without.term = 0;
      EXPECT_NE(compare(without), "");
    }
}

TEST(SparseAttentionJudge, NoRoomForFewColumnsOrFp32) {
  const double before = used_of_cut_sums;
  for (const auto& [dim, dtype] : {std::pair{int64_t{128}, DType::bf16}, {576, DType::f32}}) {
    const Case c = of_columns(dim, dtype);
    Outcome o = right(c);
    ASSERT_EQ(judge(c, o), "");
    o.lse[3] += 1.1e-6 * std::max(truth(c).largest_logit, std::abs(o.lse[3]));
    EXPECT_NE(judge(c, o), "") << dim;
  }
  EXPECT_EQ(used_of_cut_sums, before);
}

}  // namespace
}  // namespace talea::yardsticks::sparse_attention
