// What: the interface between the operator and its lanes, and the lane table.
// Why: one table, best first, reference last; each lane accepts a problem or says why not.
// Never: includes a header of CUDA, oneDNN, MPI or NCCL.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device_facts.hpp"
#include "ops/linear_cross_entropy/finish.hpp"
#include "talea/linear_cross_entropy.hpp"

namespace talea::lce {

using Inputs = LinearCrossEntropyInputs;
using Outputs = LinearCrossEntropyOutputs;
using Options = LinearCrossEntropyOptions;
using Problem = LinearCrossEntropyProblem;
using Ranks = LinearCrossEntropyRanks;
using Result = LinearCrossEntropyResult;

// Everything a lane gets. All checks of contract.hpp have passed; the workspace is large enough.
struct Call {
  const Problem& problem;
  const DeviceFacts& device;
  const Inputs& in;
  const Outputs& out;
  Workspace workspace;
  Communicator& vocab;  // ranks of the vocabulary (and of the sequence)
  Communicator& batch;  // ranks of the batch
  Stream stream;
  Result& result;  // the lane fills what it knows
};

inline bool sums_dx_in_bf16(const Problem& p) {
  return p.world > 1 && p.wants_dx && p.dx_sum == DType::bf16;
}

struct Lane {
  const char* name;
  const char* kind;
  // Nothing: accepts. Otherwise the reason, which names the option, shape or device at fault.
  std::optional<std::string> (*decline)(const Problem&, const DeviceFacts&);
  int64_t (*workspace_bytes)(const Problem&, const DeviceFacts&);
  // One "name = value" a line: tile, chunk, schedule.
  std::vector<std::string> (*details)(const Problem&, const DeviceFacts&);
  void (*run)(const Call&);
  // Nothing, or why under lane = auto another lane that accepts should come before this one.
  std::optional<std::string> (*yields)(const Problem&) = nullptr;
};

// Best first, reference last. Lanes not built are in the table and decline with "not built".
std::span<const Lane> lanes();

Lane reference_lane();
Lane unfused_lane();
Lane cpu_lane();
Lane cuda_lane();
Lane sm90_lane();

}  // namespace talea::lce
