// What: cases in which every pair of sizes, types and options occurs, on every lane, against fp64.
// Why: section 11.2 of the acceptance: no combination is right by accident.
// Never: skips a case; a lane that declines one says why and that must be expected.
#include "ops/mamba3/run.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

class ScanPairwise : public ScanLane {};

TEST_P(ScanPairwise, EveryPairOfChoicesIsRight) {
  const std::vector<Case> cases = pairwise_cases(11);
  EXPECT_GT(cases.size(), 30u);
  int number = 0;
  for (const Case& c : cases) {
    How how;
    how.save = number % 2 == 1;
    EXPECT_EQ(verify(lane(), c, how), "") << "case " << number;
    ++number;
  }
}

TALEA_EVERY_SCAN_LANE(ScanPairwise);

}  // namespace
}  // namespace talea::yardsticks::mamba3
