// What: runs one lane of the scan on one case, with everything around the tensors watched.
// Why: inputs unchanged, guards intact and the declared workspace are checked on every call.
// Never: judges the values.
#pragma once

#include <gtest/gtest.h>

#include "ops/mamba3/errand.hpp"
#include "yardsticks/mamba3/draw.hpp"
#include "yardsticks/mamba3/judge.hpp"

namespace talea::yardsticks::mamba3 {

struct Outcome {
  Tensors out;
  talea::mamba3::Result forward, backward;
  std::string damage;  // what was written that must not be; empty: nothing
};

struct How {
  bool forward = true, backward = true;
  bool save = false;  // backward from what forward saved
  talea::mamba3::Ranks ranks{};
  std::set<std::string> only{};  // outputs; empty: all
};

// Runs the case; the workspace has exactly the declared size, lies at an odd multiple of 8 bytes
// and holds 0xFF in every byte. Throws as the call does.
Outcome run(const std::string& lane, const Case& c, const How& how = {});

// Runs one step on the case (S = 1) whose initial states are the caches; `out` also has "state_*".
Outcome run_step(const std::string& lane, const Case& c, const std::vector<int64_t>& slots);

// Judged against the oracle and lane unfused. Empty: right.
std::string verify(const std::string& lane, const Case& c, const How& how = {});
// The same of that many draws of the case together: of a token eager arithmetic has too few errors
// for one draw to say how large they are.
std::string verify_draws(const std::string& lane, const Case& c, int draws, const How& how = {});

// What a step gave, by the names that a scan of one token has for it.
Tensors as_scanned(const Outcome& step);
// Empty: a step of a case of one token is right, in every output and state.
std::string verify_step(const std::string& lane, const Case& c);

// Empty: the same bits in each tensor of both; at least one.
std::string same_bits(const Tensors& a, const Tensors& b);

class ScanLane : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = missing(lane()); !why.empty()) GTEST_SKIP() << why;
    calls_before_ = calls_made;
  }
  // A test without a case has shown nothing.
  void TearDown() override {
    if (IsSkipped() || of_errors_) return;
    EXPECT_GT(calls_made, calls_before_) << "lane " << lane() << " ran no case of this test";
  }
  // Of calls that must not come back.
  void of_errors() { of_errors_ = true; }
  const std::string& lane() const { return GetParam(); }
  // The lane's chunk where the recurrence has one, else none.
  void chunk(Case& c, int64_t tokens) const {
    c.options.chunk = lane() == "reference" ? 0 : tokens;
  }

 private:
  int64_t calls_before_ = 0;
  bool of_errors_ = false;
};

#define TALEA_SCAN_LANES(suite, lanes)                                                            \
  INSTANTIATE_TEST_SUITE_P(Lanes, suite, ::testing::ValuesIn(::talea::yardsticks::mamba3::lanes), \
                           [](const auto& info) { return info.param; })
#define TALEA_EVERY_SCAN_LANE(suite) TALEA_SCAN_LANES(suite, tested_lanes())

}  // namespace talea::yardsticks::mamba3
