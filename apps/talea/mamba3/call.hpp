// What: a call of the scan on host tensors: outputs allocated by name, over threads as ranks,
// measured.
// Why: scan and check make the same call; a piece of a rank is a view, never a copy of rows.
// Never: reads or writes a file.
#pragma once

#include "io/host_tensor.hpp"
#include "io/safetensors.hpp"
#include "ops/mamba3/receipt.hpp"

namespace talea::cli::scan {

struct World {
  int ranks = 1;
  bool tokens = false;  // cut the tokens; else the heads
  double timeout_s = 30;
  Communicator* processes = nullptr;  // the ranks are processes; null: threads of this one
};

struct Outputs {
  mamba3::Outputs views;
  std::vector<io::NamedTensor> named;  // in the order of the files' axes
  std::vector<io::HostTensor> owners;
  bool forward = false, backward = false;
};

// What a scan without --outputs gives: out and, with an upstream, every gradient there is.
std::vector<std::string> all_outputs(const mamba3::Inputs& in);
// By the names of docs/cli.md. out and gradients in the dtype of their tensor, final states in fp32
// (fp64 beside fp64). Error(usage) for a name that is none, a gradient of an absent tensor, or one
// without any upstream.
Outputs allocate_outputs(const std::vector<std::string>& names, const mamba3::Inputs& in,
                         const std::string& layout);

struct Ran {
  mamba3::Problem problem;
  mamba3::Result result;
  std::vector<mamba3::PieceFact> pieces;
  double ms = 0;
  int64_t peak_extra_bytes = -1;
};

Ran run_pass(mamba3::Pass pass, const mamba3::Inputs& in, const mamba3::Outputs& out,
             const mamba3::Options& options, const World& world = {});

// The least workspace limit that each of its ranks can keep.
int64_t least_limit(mamba3::Pass pass, const mamba3::Inputs& in, const mamba3::Outputs& out,
                    const mamba3::Options& options, const World& world);

// Forward as steps of one token each, on states that start as the initial ones. Error(usage) for
// packed sequences.
Ran run_steps(const mamba3::Inputs& in, const mamba3::Outputs& out, const mamba3::Options& options);

}  // namespace talea::cli::scan
