// What: the ranks of a call compare what they were asked to do, before any work.
// Why: a disagreement is an error that names the field, not a hang or a wrong number.
// Never: touches hidden, weight or an output.
#pragma once

#include <array>

#include "dist/agree.hpp"
#include "ops/linear_cross_entropy/contract.hpp"

namespace talea::lce {

// The vocabulary's ranks, then the batch's; nobody where the caller wants no handshake.
std::array<Meeting, 2> meetings_of(const Ranks& ranks);

// Also checks that the vocabulary shards are disjoint and cover [0, vocab), and writes them into
// the result.
void shake_hands(const Problem& p, const Inputs& in, const std::string& lane, Meeting& vocab,
                 Result& result);

// The same for the ranks that share the batch; notes the factor between a local and a global mean.
void shake_batch_hands(const Problem& p, const Inputs& in, Meeting& batch, Result& result);

}  // namespace talea::lce
