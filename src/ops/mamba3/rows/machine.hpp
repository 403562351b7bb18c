// What: the launches that device lanes share, on a stream of the current device.
// Why: run.cpp says in which order; this is where what lies beside the chunks becomes kernels.
// Never: allocates or synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/mamba3/rows/run.hpp"

namespace talea::mamba3::cuda {

// A pass with all that its kernels may need.
struct Launch {
  const Plan& plan;
  const Buffers& buffers;
  cudaStream_t stream;
};

// The chunks themselves are a lane's own.
class DeviceMachine : public Machine {
 public:
  explicit DeviceMachine(const Launch& at) : at_(at) {}
  void read_sequences(const Sizes& sizes, const Sequences& from) override;
  void clear_padding(const Args& args) override;
  void sum_rows(const Args& args, const Wave& wave) override;
  void clear_totals(const Args& args) override;
  void add_parameters(const Args& args, const Wave& wave) override;
  void store_parameters(const Args& args) override;

 protected:
  Launch at_;
};

// The one synchronisation of SequenceCheck::checked.
void check_sequences(const Call& call, const Launch& at, DeviceMachine& machine);
void refuse_capture(cudaStream_t stream);
void check_counts(const int64_t* counts, cudaStream_t stream);  // [4] as in Outputs::status

}  // namespace talea::mamba3::cuda
