// What: a call shared by ranks: heads cut, tokens cut, or both, around a lane that knows neither.
// Why: pieces of a sequence merge like chunks; every host lane takes part without a line of its
// own. Never: waits for another rank's scan, or lets a result depend on who arrived first.
#pragma once

#include "ops/mamba3/contract.hpp"

namespace talea::mamba3 {

// The lane's workspace and what the exchanges need beside it.
int64_t ranked_workspace(const Problem& p, const Lane& lane, const DeviceFacts& device);

// Runs the lane, alone or as one rank of the worlds in `ranks`.
void run_ranked(const Lane& lane, const Call& call, const Ranks& ranks);

}  // namespace talea::mamba3
