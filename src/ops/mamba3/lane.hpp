// What: the interface between the scan and its lanes, and the lane table.
// Why: one table, best first, reference last; each lane accepts a problem or says why not.
// Never: includes a header of CUDA, MPI or NCCL.
#pragma once

#include "core/operator.hpp"
#include "talea/mamba3.hpp"

namespace talea::mamba3 {

// Everything a lane gets. All checks of contract.hpp have passed; the workspace is large enough.
// Tensors have their full number of axes: q, k, d_q, d_k [B, S, R, G, N]; out, d_out
// [B, S, R or 1, H, P]; biases [H, R, N]; k states [n, R, H, N]. A step has S = 1, and its state
// caches are the initial as well as the final states; sequence i has row slots[i] of them.
struct Call {
  const Problem& problem;
  const DeviceFacts& device;
  const Inputs& in;
  const Outputs& out;
  const Tensor& slots;
  Workspace workspace;
  const Ranks& ranks;  // cuts are resolved around a lane (ranks.hpp), which looks at none
  Stream stream;
  Result& result;  // the lane fills what it knows
  // Turns that lie before this piece of each sequence, [n, H, A]; null: none (scan_state.hpp).
  const uint64_t* angle_offset = nullptr;
  // Where the turns behind the last token go, as they are; null: nobody asks.
  uint64_t* final_turns = nullptr;
};

struct Operator {
  using Problem = mamba3::Problem;
  using Call = mamba3::Call;
  using Result = mamba3::Result;
  static std::span<const talea::Lane<Operator>> lanes();
};
using Lane = talea::Lane<Operator>;

Lane sm90_lane();
Lane cuda_lane();
Lane cpu_lane();
Lane unfused_lane();
Lane reference_lane();

}  // namespace talea::mamba3
