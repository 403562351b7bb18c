// What: a call whose heads or rows are cut over ranks, as one lane call on this rank between sums.
// Why: lanes know nothing of ranks; the exchanges and their buffers are written once.
// Never: exchanges where the world is one rank.
#pragma once

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// The problem that the lane of this rank sees: all keys, fp32 sums that the ranks add up.
Problem local_problem(const Problem& p);

// Of the exchanges alone; the lane's own bytes come on top. 0 in a world of one.
int64_t exchange_bytes(const Problem& p);

// Runs the lane on this rank's part.
void run_sharded(const Lane& lane, const Call& call);

}  // namespace talea::sparse_attention
