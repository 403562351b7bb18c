// What: one rank's piece of sequences that are cut along their tokens.
// Why: a piece acts on the state as h -> a h + T: pieces merge in rank order, from one exchange.
// Never: waits for another rank's scan; each replays the chain up to its own place.
#pragma once

#include "core/arena.hpp"
#include "ops/mamba3/ranks.hpp"

namespace talea::mamba3 {

// The calls of the lane that a rank makes on its piece: its turns alone, its state from nothing, in
// backward what it adds to the state's gradient, and the piece itself between its neighbours.
struct PieceProblems {
  explicit PieceProblems(const Problem& p);
  Problem turns, summary, feedback, whole;
};

// Where each rank's piece of a sequence begins and ends; what the exchanges leave.
struct PieceMemory {
  PieceMemory(Arena& arena, const Problem& p);
  int64_t *begins, *lengths;  // [world] of the tokens; [world, n] of the sequences' pieces
  int32_t* cu;                // [n + 1], of this piece
  uint64_t *turns, *all_turns, *before;  // [n, H, A], [world, ...], of the ranks before
  double *decay, *all_decays;            // [n, H, 2]: sum of adt (-Inf: a reset), first b
  char *summary, *summaries;             // [n, H, P N], [n, R, H, N], [n, H, P]
  char *feedback, *feedbacks;            // [n, H, P N]
  char *initial, *last;                  // as summary: states before the piece, gradients behind it
  char* last_angle;                      // [n, H, A]
  double *h, *e, *k, *v, *turn;          // of one head
};

// The lane, with its decision on each of those problems.
struct PieceLane {
  RunAlone run;
  const RankedPlan& plan;
};
void run_piece(const PieceLane& lane, const Call& call, Arena& arena);

}  // namespace talea::mamba3
