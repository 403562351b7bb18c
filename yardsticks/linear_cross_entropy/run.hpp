// What: runs one lane on one case and brings the outputs back, with everything around watched.
// Why: inputs unchanged, guards intact and the declared workspace are checked on every call.
// Never: judges the values.
#pragma once

#include <optional>
#include <string>

#include "yardsticks/linear_cross_entropy/case.hpp"
#include "yardsticks/linear_cross_entropy/lanes.hpp"

namespace talea::testing {

struct Outcome {
  LinearCrossEntropyResult result;
  CaseOutputs out;
  std::string damage;  // what was written that must not be; empty: nothing
};

// Runs the fitted case. Throws talea::Error as the call does. The workspace has exactly the
// declared size, starts at an odd multiple of 8 bytes and holds 0xFF in every byte.
Outcome run_lane(Place& place, const std::string& lane, const Case& c,
                 const LinearCrossEntropyRanks& ranks = {});

// Why the lane declines the case, or nothing where it accepts. Throws where the case is an error.
std::optional<std::string> declines(Place& place, const std::string& lane, const Case& c,
                                    const LinearCrossEntropyRanks& ranks = {});

// Runs, judges and counts. Empty: right, or declined with a reason where that is allowed.
std::string verify(const std::string& lane, const Case& c, const Yardsticks& y);
std::string verify(const std::string& lane, const Case& c);

// Calls that came back, of this process: run_lane counts its own.
int64_t runs_of(const std::string& lane);
void count_run(const std::string& lane);

// One line a lane: accepted, declined, and each reason with its count.
std::string tally();

}  // namespace talea::testing
