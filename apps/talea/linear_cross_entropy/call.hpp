// What: one call of the operator with its outputs allocated and its memory measured.
// Why: loss and bench make the same call and report the same facts.
// Never: reads or writes a file.
#pragma once

#include "io/host_tensor.hpp"
#include "io/safetensors.hpp"
#include "options.hpp"
#include "shards.hpp"

namespace talea::cli {

struct HostOutputs {
  LinearCrossEntropyOutputs views;
  std::vector<io::NamedTensor> named;  // under the names of docs/cli.md
  std::vector<io::HostTensor> owners;
};

// Loss and per-token outputs in fp32 (fp64 for fp64 hidden), gradients in the dtype of their input.
HostOutputs allocate_outputs(const Wanted& wanted, const LinearCrossEntropyInputs& in,
                             const LinearCrossEntropyOptions& options);

struct MeasuredCall {
  LinearCrossEntropyProblem problem;
  LinearCrossEntropyResult result;
  std::vector<lce::ShardFigures> ranks;  // of a world of more than one
  double ms = 0;                         // of the slowest rank
  int64_t peak_extra_bytes = -1;         // workspace and everything else above inputs and outputs
  int64_t logits_columns = 0;            // of what this process would have to hold
  // The peak is below the bytes of [tokens, vocab] in 16 bits: no full logits tensor was possible.
  bool full_logits_excluded() const;
};

// Ranks that are threads of this process are measured together.
MeasuredCall measured_call(const LinearCrossEntropyInputs& in, const LinearCrossEntropyOutputs& out,
                           const LinearCrossEntropyOptions& options);
MeasuredCall measured_call(const lce::ShardedCall& whole, const ShardWorld& world);

}  // namespace talea::cli
