// What: the options of a call with a limit that its lane can keep.
// Why: cases draw limits down to 0 to get many chunks; one that cannot be kept is an error, which
//      has tests of its own.
// Never: changes a limit that can be kept.
#pragma once

#include "talea/linear_cross_entropy.hpp"

namespace talea::testing {

// The least limit under which the lane of the options runs; the same for every rank. It is the
// number that the error of a limit of 0 names.
int64_t least_limit(LinearCrossEntropyProblem p);

// A limit under which many chunks are wanted becomes the least that gives them.
LinearCrossEntropyOptions with_kept_limit(const LinearCrossEntropyInputs& in,
                                          const LinearCrossEntropyOutputs& out,
                                          LinearCrossEntropyOptions options,
                                          const LinearCrossEntropyRanks& ranks = {});

}  // namespace talea::testing
