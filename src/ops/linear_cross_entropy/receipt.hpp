// What: one call of linear cross-entropy as a section of a receipt, and its result in one line.
// Why: the envelope is every operator's; what a call must name is this operator's.
// Never: touches a file, or computes a result.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "core/receipt.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::lce {

struct ShardFact {
  int rank = 0;
  int64_t begin = 0, end = 0;
};

// Only problem and result must be set.
struct CallFacts : CallMeasures {
  LinearCrossEntropyProblem problem;  // its options are the call's options
  LinearCrossEntropyResult result;
  std::string layout = "[N,D]";
  std::vector<ShardFact> shards;      // empty: this rank's alone
  std::string collective = "none";    // engine of the exchange, e.g. "threads"
  bool full_logits_measured = false;  // the allocator, not the lane, says so
  std::optional<double> ratio_to_plain_products;
};

// For Receipt::call().
nlohmann::json call_json(const CallFacts& facts);

// What ran, for callers of the C interface, who know the problem.
std::string result_text(const LinearCrossEntropyResult& result);

}  // namespace talea::lce
