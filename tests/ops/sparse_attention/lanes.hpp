// What: the fixture of every sparse attention test that runs on each lane of this build.
// Why: one parametrised suite; a lane that is added to the table is tested without changes.
// Never: passes where a lane ran no case, or in silence where its device is missing.
#pragma once

#include <gtest/gtest.h>

#include "yardsticks/sparse_attention/run.hpp"

namespace talea::testing {

namespace sa = ::talea::sparse_attention;
using namespace ::talea::yardsticks::sparse_attention;

// Lanes of this build: those of the host, and those of a device whether one is here or not.
std::vector<std::string> attention_lanes();
std::vector<std::string> host_attention_lanes();
std::vector<std::string> device_attention_lanes();
// Where the tensors of a lane lie; nothing is said where that is the host.
Place* place_of_attention(const std::string& lane, std::string& why);
// The spec as the lane can take it: device lanes multiply columns in sixteens; a lane of tensor
// cores alone takes plain rows of 16 bits or packed ones, and weights as one number.
Spec fitted(const std::string& lane, Spec s);

class AttentionLane : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string why;
    place_ = place_of_attention(lane(), why);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_GT(runs_, 0) << "lane " << lane() << " ran no case of this test";
  }
  const std::string& lane() const { return GetParam(); }
  Place* place() const { return place_; }
  Case make(const Spec& s) const { return make_case(fitted(lane(), s)); }
  Outcome run(const Case& c, int threads = 0) {
    ++runs_;
    return run_lane(c, lane(), threads, place_);
  }
  // Right, or declined with a reason that this lane may have.
  void expect_right(const Case& c, const std::string& what = "") {
    const std::string reason = declines(c, lane(), place_);
    if (!reason.empty()) {
      EXPECT_TRUE(may_decline(c)) << lane() << ": " << reason << "; " << what;
      return;
    }
    EXPECT_EQ(judge(c, run(c), lane() == "cpu"), "") << what;
  }
  bool accepts(const Case& c) { return declines(c, lane(), place_).empty(); }
  bool may_decline(const Case& c) const {
    if (lane() == "reference") return false;
    if (c.q.dtype() == DType::f64) return true;
    return lane() == "unfused" && (c.options.kv_storage != sa::KvStorage::plain || c.table ||
                                   c.options.index_space == sa::IndexSpace::slots);
  }
  int runs_ = 0;

 private:
  Place* place_ = nullptr;
};

#define TALEA_ATTENTION_ON(suite, lanes)                                                 \
  INSTANTIATE_TEST_SUITE_P(Lanes, suite, ::testing::ValuesIn(::talea::testing::lanes()), \
                           [](const auto& info) { return info.param; })
#define TALEA_ATTENTION_LANES(suite) TALEA_ATTENTION_ON(suite, attention_lanes)

}  // namespace talea::testing
