// What: what a lane of this operator gets, and the lanes there are.
// Why: one table, best first, reference last; each lane accepts a problem or says why not.
// Never: includes a header of CUDA, MPI or NCCL.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/operator.hpp"
#include "ops/sparse_attention/args.hpp"

namespace talea::sparse_attention {

// Everything a lane gets. All checks of contract.hpp have passed; the workspace is large enough.
struct Call {
  const Problem& problem;
  const DeviceFacts& device;
  const Args& args;
  Workspace workspace;
  Communicator& heads;
  Communicator& sequence;
  Communicator& batch;
  Stream stream;
  Result& result;  // the lane fills what it knows
};

struct Operator {
  using Problem = sparse_attention::Problem;
  using Call = sparse_attention::Call;
  using Result = sparse_attention::Result;
  // Best first, reference last. Lanes not built are in the table and decline with "not built".
  static std::span<const talea::Lane<Operator>> lanes();
};
using Lane = talea::Lane<Operator>;

Lane reference_lane();
Lane unfused_lane();
Lane cpu_lane();
Lane cuda_lane();
Lane sm90_lane();

}  // namespace talea::sparse_attention
