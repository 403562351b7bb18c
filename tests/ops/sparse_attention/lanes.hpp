// What: the fixture of every sparse attention test that runs on each lane of this build.
// Why: one parametrised suite; a lane that is added to the table is tested without changes.
// Never: passes where a lane ran no case.
#pragma once

#include <gtest/gtest.h>

#include "yardsticks/sparse_attention/run.hpp"

namespace talea::testing {

namespace sa = ::talea::sparse_attention;
using namespace ::talea::yardsticks::sparse_attention;

// Lanes of this build that run on this machine.
std::vector<std::string> attention_lanes();

class AttentionLane : public ::testing::TestWithParam<std::string> {
 protected:
  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_GT(runs_, 0) << "lane " << lane() << " ran no case of this test";
  }
  const std::string& lane() const { return GetParam(); }
  Outcome run(const Case& c, int threads = 0) {
    ++runs_;
    return run_lane(c, lane(), threads);
  }
  // Right, or declined with a reason that this lane may have.
  void expect_right(const Case& c, const std::string& what = "") {
    const std::string reason = declines(c, lane());
    if (!reason.empty()) {
      EXPECT_TRUE(may_decline(c)) << lane() << ": " << reason << "; " << what;
      return;
    }
    EXPECT_EQ(judge(c, run(c), lane() == "cpu"), "") << what;
  }
  bool accepts(const Case& c) { return declines(c, lane()).empty(); }
  bool may_decline(const Case& c) const {
    if (lane() == "reference") return false;
    if (c.q.dtype() == DType::f64) return true;
    return lane() == "unfused" && (c.options.kv_storage != sa::KvStorage::plain || c.table ||
                                   c.options.index_space == sa::IndexSpace::slots);
  }
  int runs_ = 0;
};

#define TALEA_ATTENTION_LANES(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(Lanes, suite, ::testing::ValuesIn(::talea::testing::attention_lanes()), \
                           [](const auto& info) { return info.param; })

}  // namespace talea::testing
