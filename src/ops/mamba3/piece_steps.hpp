// What: what a rank tells of its piece, where the exchanges leave it, and the steps beside the lane's
//       calls on device tensors.
// Why: token_ranks.cpp says in which order; kernels see no more of a call than this.
// Never: exchanges.
#pragma once

#include "ops/mamba3/pieces.hpp"
#include "talea/communicator.hpp"
#include "talea/mamba3.hpp"

namespace talea {
class Arena;
}

namespace talea::mamba3 {

// What a rank tells of its piece before any state is known, 8 bytes each.
struct Measures {
  Measures(const Problem& p, char* data);
  int64_t* lengths;  // [n] tokens
  double* decays;    // [n, H, 2]: what is left behind the piece, b of its first token
  uint64_t* turns;   // [n, H, A]
  static int64_t words(const Problem& p) { return p.sequences * (1 + p.heads * (2 + p.pairs)); }
};

// What ranks tell each other in forward. `saved` keeps it behind the lane's own: backward is then
// told of the gradients alone.
struct PieceTold {
  PieceTold() = default;
  PieceTold(const Problem& p, char* data);
  static int64_t bytes(const Problem& p);
  // Where what follows so many bytes lies, from whatever address on: `saved` may be moved.
  static int64_t behind(int64_t bytes) { return (bytes + 15) / 16 * 16; }
  char* measures = nullptr;   // of each rank
  char* summaries = nullptr;  // of each rank [n, H, P N], [n, R, H, N], [n, H, P]
};

// What the exchanges leave.
struct PieceMemory {
  PieceMemory(Arena& arena, const Problem& p);
  int32_t* cu;      // [n + 1], of this piece
  int64_t* status;  // [4], of the entries of cu_seqlens
  char* measures;
  PieceTold told;
  uint64_t* before;  // [n, H, A], turns of the ranks before
  // One behind another: what the piece makes of nothing, as a summary; what it adds to the gradient
  // before it; the gradients behind it, as a summary.
  char* own;
  char* feedbacks;   // of each rank [n, H, P N]
  char* initial;     // states before the piece, as a summary
  char* last_angle;  // [n, H, A]
};

struct PieceCall {
  const Problem& problem;
  const Inputs& in;
  const Outputs& out;
  Stream stream;
};

// The steps beside the lane's calls, of device tensors: queued on the call's stream.
// Sequences of this piece of the whole `tokens`, and their measures unless they are known.
void measure_on_device(const PieceCall& c, const PieceMemory& m, int64_t tokens, bool known);
void turns_before_on_device(const PieceCall& c, const PieceMemory& m);
// States before this piece, and behind all.
void states_on_device(const PieceCall& c, const Pieces& x, const PieceStates& initial,
                      const PieceStates& last);
// Gradients behind this piece, and before all.
void gradients_on_device(const PieceCall& c, const Pieces& x, const PieceStates& last,
                         const PieceStates& initial);

PieceView view_of(const Tensor& t);
PieceStates views_of(const States& s);

}  // namespace talea::mamba3
