// What: a drawn problem of the scan in the model's form, with every output that a pass can have.
// Why: bench and explain ask about the same problem.
// Never: measures or compares.
#pragma once

#include "flags.hpp"
#include "io/host_tensor.hpp"

namespace talea::cli::scan {

struct Drawn {
  mamba3::Inputs in;           // with d_out
  mamba3::Outputs out, d;      // of forward, of backward: every gradient of `in`
  mamba3::StepArguments step;  // one token an entry of the batch
  std::vector<io::HostTensor> owners;
};

// Gate, skip, biases, angles shared by the heads (a quarter of the columns of q, as the model has
// them), projections where rank > 1. draw_empty: at made-up addresses that nobody reads.
Drawn draw(const SizeFlags& sizes, DType dtype, uint64_t seed);
Drawn draw_empty(const SizeFlags& sizes, DType dtype, DeviceKind device);

// The problem of a pass as the library sees it.
mamba3::Problem problem_of(const Drawn& drawn, mamba3::Pass pass, const mamba3::Options& options);

}  // namespace talea::cli::scan
