// What: the table entry of lane sm90: chunks of a head by warpgroups, the state in registers.
// Why: the sizes that models are trained at, in bf16, on Hopper.
// Never: declines in silence, or holds more than the workspace limit.
#include "core/arena.hpp"
#include "core/fail.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/rows/machine.hpp"
#include "ops/mamba3/sm90/config.hpp"
#include "ops/mamba3/sm90/machine.hpp"

namespace talea::mamba3 {
namespace {

class HopperMachine final : public cuda::DeviceMachine {
 public:
  using DeviceMachine::DeviceMachine;
  void forward(const cuda::Args& a) override { sm90::launch_forward(a, at_.stream); }
  void begin_units(const cuda::Args& a, const cuda::Wave& w) override {
    sm90::launch_begin(a, w, at_.buffers.units, at_.stream);
  }
  void segment_states(const cuda::Args& a, const cuda::Wave& w) override {
    sm90::launch_segment(a, w, at_.buffers.units, at_.stream);
  }
  void slice_back(const cuda::Args& a, const cuda::Wave& w) override {
    sm90::launch_back(a, w, at_.buffers.units, at_.stream);
  }
  void sum_rows(const cuda::Args& a, const cuda::Wave& w) override {
    sm90::launch_sums(a, w, at_.buffers.units, at_.stream);
  }
};

std::optional<std::string> decline(const Problem& p, const DeviceFacts& d) {
  if (p.device != DeviceKind::cuda) return "host tensors: this lane reads device memory";
  if (d.cuda_devices == 0) return d.cuda_problem.empty() ? "no CUDA device" : d.cuda_problem;
  if (d.sm != 90) return fmt::format("sm_{}: needs sm_90", d.sm);
  return sm90::declined(p, d);
}

Planned plan(const Problem& p, const DeviceFacts& d) {
  const cuda::Plan made = sm90::make_plan(p, d);
  const double flops = useful_flops(p, made.chunk) * (p.backward() ? 4.0 / 3 : 1);
  Planned all = planned(cuda::workspace_of(p, made), flops, made);
  all.kept_bytes = cuda::saved_of(p, made);
  return all;
}

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  const auto& made = planned.as<cuda::Plan>();
  std::vector<std::string> said = {
      "operands = bf16", fmt::format("chunk = {} tokens, {} rows", made.chunk, made.chunk * p.rank),
      "state = registers"};
  if (!p.backward()) return said;
  said.push_back(fmt::format("segment = {} chunks, slice = {} chunks", made.segment, made.slice));
  said.push_back(fmt::format("wave = {} sequences", made.wave));
  return said;
}

void record(const Call& c, const cuda::Plan& made) {
  const Problem& p = c.problem;
  Result& r = c.result;
  r.schedule = Schedule::sequential;
  r.chunk_tokens = made.chunk;
  r.chunk_rows = made.chunk * p.rank;
  r.segment_chunks = made.segment;
  r.state_home = "registers";
  r.state_dtype = "fp32";
  r.accumulator_angle = "64-bit integers of 2^-64 turn, fp32 increments";
  r.accumulator_decay = "fp64 within a chunk, used as two fp32";
  r.accumulator_state = r.accumulator_state_gradient = r.accumulator_rows = "fp32";
  r.accumulator_parameters = "fp32 within a slice of chunks, fp64 across slices and sequences";
  r.accumulator_groups = "fp32 in the order of the heads, biases before";
  r.notes.push_back("operands: bf16");
  if (p.options.schedule == Schedule::parallel)
    r.notes.push_back("schedule = parallel: this lane takes the chunks of a head in turn");
  if (!p.backward()) return;
  r.shared_product = "dO V^T once, used by dq, dk, d_dt, d_trap, d_d";
  r.notes.push_back(c.in.saved ? "states from `saved`" : "states computed anew");
}

void run(const Call& c, const Planned& planned) {
  const auto& made = planned.as<cuda::Plan>();
  const device::DeviceGuard guard(c.problem.device_index);
  const cudaStream_t stream = device::cuda_stream(c.stream);
  device::refuse_earlier_error(stream);
  Arena arena(c.workspace);
  const cuda::Buffers buffers = cuda::lay_out(arena, c.problem, made);
  const cuda::Launch at = {made, buffers, stream};
  HopperMachine machine(at);
  cuda::check_sequences(c, at, machine);
  cuda::run_pass(machine, c, made, buffers);
  record(c, made);
}

}  // namespace

Lane sm90_lane() {
  return {.name = "sm90",
          .kind = "native kernel",
          .runs_on = DeviceKind::cuda,
          .decline = decline,
          .plan = plan,
          .details = details,
          .run = run};
}

}  // namespace talea::mamba3
