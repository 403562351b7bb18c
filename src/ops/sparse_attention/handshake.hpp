// What: the ranks of a call compare what they were asked to do, before any work.
// Why: a disagreement is an error that names the field, not a hang or a wrong number.
// Never: touches q, kv or an output.
#pragma once

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// Ranks that cut heads share everything but their heads; those that cut the sequence everything but
// their rows. Shards must be disjoint and cover the whole.
void shake_hands(const Problem& p, const Args& a, const std::string& lane, Communicator& heads,
                 Communicator& sequence);

}  // namespace talea::sparse_attention
