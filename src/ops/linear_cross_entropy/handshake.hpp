// What: the ranks of a call compare what they were asked to do, before any work.
// Why: a disagreement is an error that names the field, not a hang or a wrong number.
// Never: touches hidden, weight or an output.
#pragma once

#include "ops/linear_cross_entropy/contract.hpp"

namespace talea::lce {

// Also checks that the vocabulary shards are disjoint and cover [0, vocab), and writes them into
// the result.
void shake_hands(const Problem& p, const Inputs& in, const std::string& lane, Communicator& vocab,
                 Result& result);

// The same for the ranks that share the batch; notes the factor between a local and a global mean.
void shake_batch_hands(const Problem& p, const Inputs& in, Communicator& batch, Result& result);

}  // namespace talea::lce
