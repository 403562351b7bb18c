// What: a call of sparse attention and its result, as JSON and as a section of a receipt.
// Why: C, Python and the tool report the same facts under the same names.
// Never: computes a result; it only names what the library reported.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "core/receipt.hpp"
#include "talea/sparse_attention.hpp"

namespace talea::sparse_attention {

const char* name_of(Pass pass);

// What one rank held, and what it cost it.
struct ShareFact {
  int rank = 0;
  int64_t begin = 0, end = 0;  // heads, or queries
  double ms = 0;
  int64_t workspace_bytes = 0;
};

// One call. Only problem and result must be set.
struct CallFacts : CallMeasures {
  Problem problem;
  Result result;
  std::string layout = "bshd";
  std::vector<std::string> outputs;  // names of what was asked for
  std::string cut = "none";          // heads, sequence
  std::string collective = "none";   // engine of the exchange, e.g. "threads"
  std::vector<ShareFact> shares;
  std::optional<double> ratio_to_plain_products;
};

// For Receipt::call().
nlohmann::json call_json(const CallFacts& facts);
// What ran in one call, in one line of JSON: for callers of the C interface, who know the problem.
std::string result_text(const Result& result);

}  // namespace talea::sparse_attention
