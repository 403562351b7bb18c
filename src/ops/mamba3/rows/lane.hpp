// What: what the doors of the device lanes share: the plan's bytes, the passes, the record.
// Why: the lanes differ in which chunks they take and how they form them, not in the way through.
// Never: names a lane, or decides for one.
#pragma once

#include <string>
#include <vector>

#include "core/arena.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/rows/machine.hpp"

namespace talea::mamba3::cuda {

// Why host tensors and a missing device are no lane's here; nothing where there is a device.
std::optional<std::string> declined_place(const Problem& p, const DeviceFacts& d);

Planned planned_bytes(const Problem& p, const Plan& made);

// What `explain` says of a step.
std::vector<std::string> step_details();

// What `explain` adds for backward.
void append_backward(std::vector<std::string>& said, const Problem& p, const Plan& made);

// The receipt's part of a call; `state_home`: where the state lies between two chunks;
// `parameters`: over how much the sums of the parameters are in fp32.
void record(const Call& c, const Plan& made, const char* state_home, const char* parameters);

// A call with the kernels of M, a DeviceMachine.
template <typename M>
void run_passes(const Call& c, const Plan& made) {
  const device::DeviceGuard guard(c.problem.device_index);
  const cudaStream_t stream = device::cuda_stream(c.stream);
  device::refuse_earlier_error(stream);
  Arena arena(c.workspace);
  const Buffers buffers = lay_out(arena, c.problem, made);
  const Launch at = {made, buffers, stream};
  M machine(at);
  check_sequences(c, at, machine);
  run_pass(machine, c, made, buffers);
}

}  // namespace talea::mamba3::cuda
