// What: a step at sizes that models have and at sizes beside them, on every lane.
// Why: a device has a kernel of its own for it: rows that fill vectors and warps, and rows that do not.
// Never: a tolerance of its own: the rule of judge.hpp.
#include <tuple>

#include "ops/mamba3/run.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

std::vector<std::string> every_lane() {
  std::vector<std::string> names = tested_lanes();
  for (const std::string& name : lanes_of_sizes()) names.push_back(name);
  return names;
}

class ScanSteps : public ScanLane {
 protected:
  std::vector<DType> dtypes() const {
    if (lane() == "sm90") return {DType::bf16};
    return {DType::f32, DType::bf16, DType::f16};
  }
};

TEST_P(ScanSteps, EverySize) {
  for (const DType dtype : dtypes())
    for (const auto& [R, N, P] : {std::tuple<int64_t, int64_t, int64_t>{4, 128, 64},
                                  {1, 128, 64},
                                  {2, 64, 128},
                                  {8, 128, 64},
                                  {1, 256, 256},
                                  {8, 64, 128},
                                  {4, 256, 64},
                                  {8, 256, 256},
                                  {3, 132, 72},
                                  {2, 22, 131},
                                  {1, 21, 5}}) {
      Sizes s{2, 1, 4, 2, N, P, R, N / 4 * 2};
      s.rank_axis = R > 1;
      s.shared_angles = R == 4;
      EXPECT_EQ(verify_step(lane(), full_case(s, dtype, static_cast<uint64_t>(R + N))), "")
          << name_of(dtype) << ", R = " << R << ", N = " << N << ", P = " << P;
    }
}

TEST_P(ScanSteps, OptionsOfTheFinish) {
  Sizes s{3, 1, 4, 2, 128, 64, 4, 32};
  s.rank_axis = true;
  for (const bool norm : {false, true})
    for (const bool halves : {false, true})
      for (const bool unreduced : {false, true}) {
        Case c = full_case(s, DType::bf16, 7);
        c.options.rotary_pairs =
            halves ? talea::mamba3::RotaryPairs::halves : talea::mamba3::RotaryPairs::interleaved;
        c.options.head_norm = norm;
        if (norm) fill(c, "norm_weight", DType::bf16, 7);
        if (unreduced) c.in.erase("mimo_out");
        EXPECT_EQ(verify_step(lane(), c), "") << norm << halves << unreduced;
      }
}

// More entries than a device has blocks for: those of a block go a few at a time, one behind the
// other, and the rows of the next state are copied while one is at work. A test of the text has one
// block, a lane of the host none.
TEST_P(ScanSteps, EntriesOfABlock) {
  for (const int64_t R : {1, 2, 4, 8}) {
    Sizes s{place_of(lane()) ? 300 : 9, 1, 4, 2, 128, 64, R, 32};
    s.rank_axis = R > 1;
    EXPECT_EQ(verify_step(lane(), full_case(s, DType::bf16, 11)), "") << "R = " << R;
  }
}

TALEA_SCAN_LANES(ScanSteps, every_lane());

}  // namespace
}  // namespace talea::yardsticks::mamba3
