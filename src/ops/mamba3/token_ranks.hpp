// What: one rank's piece of sequences that are cut along their tokens.
// Why: a piece acts on the state as h -> a h + T: pieces merge in rank order, from one exchange.
// Never: waits for another rank's scan; each replays the chain up to its own place.
#pragma once

#include "core/arena.hpp"
#include "ops/mamba3/piece_steps.hpp"
#include "ops/mamba3/ranks.hpp"

namespace talea::mamba3 {

// The calls of the lane that a rank makes on its piece: its turns alone (host lanes), its state
// from nothing, in backward what it adds to the state's gradient, and the piece itself between its
// neighbours.
struct PieceProblems {
  explicit PieceProblems(const Problem& p);
  Problem turns, summary, feedback, whole;
};

// The lane, with its decision on each of those problems.
struct PieceLane {
  RunAlone run;
  const RankedPlan& plan;
};
void run_piece(const PieceLane& lane, const Call& call, Arena& arena);

}  // namespace talea::mamba3
