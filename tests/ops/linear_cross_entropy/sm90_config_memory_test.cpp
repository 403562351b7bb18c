// What: the plans of lane sm90 on chips whose memory differs.
// Why: the fit is an H200's; on an H100 the additions to dW take half as long again.
// Never: launches a kernel.
#ifdef TALEA_WITH_CUDA
#include <gtest/gtest.h>

#include "ops/linear_cross_entropy/memory_speed.hpp"
#include "ops/linear_cross_entropy/sm90_problems.hpp"

namespace talea::lce {
namespace {

double predicted(const Problem& p, const DeviceFacts& d) {
  return sm90_lane().plan(p, d).predicted_ms;
}

TEST(Sm90Memory, PredictionsFollowTheMemory) {
  DeviceFacts h200 = hopper();
  h200.memory_mhz = 3201, h200.memory_bus_bits = 6144;
  const Problem p = training(8192, 4096, 128256, 135);
  EXPECT_DOUBLE_EQ(memory_speed(p, h200), 1);
  EXPECT_DOUBLE_EQ(memory_speed(p, hopper()), 1);  // not known
  EXPECT_NEAR(memory_speed(p, h100()), 0.811, 0.001);
  EXPECT_EQ(predicted(p, h200), predicted(p, hopper()));
  EXPECT_GT(predicted(p, h100()), 1.05 * predicted(p, h200));
  EXPECT_EQ(predicted(p, h200), predicted(p, hopper()));  // not the plan that was kept last
  Problem only = p;
  only.wants_dx = only.wants_dw = false;
  EXPECT_EQ(predicted(only, h100()), predicted(only, h200));
}

TEST(Sm90Memory, RanksCutAlikeWhateverTheirChips) {
  Problem p = training(8192, 4096, 128256, 300);
  p.world = 2, p.vocab_local = p.vocab_stored = 64128;
  EXPECT_EQ(sm90::config(p, h100()).chunk_rows, sm90::config(p, hopper()).chunk_rows);
  EXPECT_EQ(predicted(p, h100()), predicted(p, hopper()));
}

TEST(Sm90Memory, ALargerLimitIsNeverSlower) {
  for (const bool rounds : {false, true}) {
    Problem p = training(8192, 4096, 128256, 0);
    if (rounds) p.dw_dtype = DType::bf16;
    double before = INFINITY;
    for (int64_t limit = workspace(p); limit < int64_t{4} << 30; limit += limit / 16) {
      p.options.workspace_limit_bytes = limit;
      EXPECT_LE(predicted(p, h100()), before) << limit;
      before = predicted(p, h100());
    }
  }
}

}  // namespace
}  // namespace talea::lce
#endif
