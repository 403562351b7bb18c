// What: the interface between the operator and its lanes, and the lane table.
// Why: one table, best first, reference last; each lane accepts a problem or says why not.
// Never: includes a header of CUDA, MPI or NCCL.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device_facts.hpp"
#include "ops/sparse_attention/args.hpp"

namespace talea::sparse_attention {

// Everything a lane gets. All checks of contract.hpp have passed; the workspace is large enough.
// Cuts over ranks are resolved around the lane; only the teacher of the index loss is summed
// inside.
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

struct Lane {
  const char* name;
  const char* kind;
  // Nothing: accepts. Otherwise the reason, which names the option, shape or device at fault.
  std::optional<std::string> (*decline)(const Problem&, const DeviceFacts&);
  int64_t (*workspace_bytes)(const Problem&, const DeviceFacts&);
  // One "name = value" a line: tile, chunk, schedule.
  std::vector<std::string> (*details)(const Problem&, const DeviceFacts&);
  void (*run)(const Call&);
};

std::span<const Lane> lane_table();

Lane reference_lane();
Lane unfused_lane();
Lane cpu_lane();
Lane cuda_lane();
Lane sm90_lane();

}  // namespace talea::sparse_attention
