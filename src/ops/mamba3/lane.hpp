// What: the interface between the scan and its lanes, and the lane table.
// Why: one table, best first, reference last; each lane accepts a problem or says why not.
// Never: includes a header of CUDA, MPI or NCCL.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device_facts.hpp"
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
  Stream stream;
  Result& result;  // the lane fills what it knows
  // Turns that lie before this piece of each sequence, [n, H, A]; null: none (turns.hpp).
  const uint64_t* angle_offset = nullptr;
  // Where the turns behind the last token go, as they are; null: nobody asks.
  uint64_t* final_turns = nullptr;
};

struct Lane {
  const char* name;
  const char* kind;
  // Nothing: accepts. Otherwise the reason, which names the option, shape or device at fault.
  std::optional<std::string> (*decline)(const Problem&, const DeviceFacts&);
  int64_t (*workspace_bytes)(const Problem&, const DeviceFacts&);
  int64_t (*saved_bytes)(const Problem&, const DeviceFacts&);
  // One "name = value" a line: chunk, schedule, segment.
  std::vector<std::string> (*details)(const Problem&, const DeviceFacts&);
  void (*run)(const Call&);
};

// Best first, reference last. Lanes not built are in the table and decline with "not built".
std::span<const Lane> lane_table();

Lane cpu_lane();
Lane unfused_lane();
Lane reference_lane();

}  // namespace talea::mamba3
