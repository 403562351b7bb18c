// What: the options of a call with a limit that its lane can keep.
// Why: cases draw limits down to 0 to get many chunks; one that cannot be kept is an error, which
//      has tests of its own.
// Never: changes a limit that can be kept.
#pragma once

#include <algorithm>
#include <limits>

#include "ops/linear_cross_entropy/lane.hpp"

namespace talea::testing {

// The least limit under which the lane of the options runs on the host; the same for every rank.
inline int64_t least_limit(LinearCrossEntropyProblem p) {
  p.options.workspace_limit_bytes = std::numeric_limits<int64_t>::max();
  p.vocab_local = p.vocab;  // no rank's shard is larger
  const LaneChoice choice = explain(p);
  p.options.workspace_limit_bytes = 0;
  for (const lce::Lane& lane : lce::Operator::lanes())
    if (lane.name == choice.lane)
      return lane.plan(p, gather_device_facts(p.device_index)).workspace_bytes;
  return 0;
}

inline LinearCrossEntropyOptions with_kept_limit(const LinearCrossEntropyInputs& in,
                                                 const LinearCrossEntropyOutputs& out,
                                                 LinearCrossEntropyOptions options,
                                                 const LinearCrossEntropyRanks& ranks = {}) {
  const LinearCrossEntropyProblem p = describe(in, out, options, ranks);
  if (p.device == DeviceKind::cpu && options.workspace_limit_bytes != workspace_auto)
    options.workspace_limit_bytes = std::max(options.workspace_limit_bytes, least_limit(p));
  return options;
}

}  // namespace talea::testing
