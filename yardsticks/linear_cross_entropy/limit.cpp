// What: see limit.hpp.
// Why: see limit.hpp.
// Never: knows a lane's plan; it asks as a caller would.
#include "yardsticks/linear_cross_entropy/limit.hpp"

#include <algorithm>
#include <string>

namespace talea::testing {

int64_t least_limit(LinearCrossEntropyProblem p) {
  p.options.workspace_limit_bytes = 0;
  try {
    workspace_bytes(p);
  } catch (const Error& e) {
    const std::string text = e.what(), mark = "needs at least ";
    const auto at = text.find(mark);
    if (at != std::string::npos) return std::stoll(text.substr(at + mark.size()));
  }
  return 0;  // nothing is needed, or no lane takes it: the call says so
}

LinearCrossEntropyOptions with_kept_limit(const LinearCrossEntropyInputs& in,
                                          const LinearCrossEntropyOutputs& out,
                                          LinearCrossEntropyOptions options,
                                          const LinearCrossEntropyRanks& ranks) {
  const LinearCrossEntropyProblem p = describe(in, out, options, ranks);
  if (options.workspace_limit_bytes != workspace_auto)
    options.workspace_limit_bytes = std::max(options.workspace_limit_bytes, least_limit(p));
  return options;
}

}  // namespace talea::testing
