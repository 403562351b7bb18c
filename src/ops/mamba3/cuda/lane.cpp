// What: the table entry of lane cuda: chunks of a head on tensor cores, a block a head.
// Why: every option on any NVIDIA GPU from sm_80.
// Never: declines in silence, or holds more than the workspace limit.
#include "core/arena.hpp"
#include "core/fail.hpp"
#include "device/common/cuda_check.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/cuda/machine.hpp"

namespace talea::mamba3 {
namespace {

constexpr int64_t widest = 256, most_rank = 8;

std::optional<std::string> decline(const Problem& p, const DeviceFacts& d) {
  if (p.device != DeviceKind::cuda) return "host tensors: this lane reads device memory";
  if (d.cuda_devices == 0) return d.cuda_problem.empty() ? "no CUDA device" : d.cuda_problem;
  if (d.sm < 80) return fmt::format("sm_{}: needs sm_80 or later", d.sm);
  if (p.dtype == DType::f64) return "fp64 q: lane reference computes it, on the host";
  if (p.heads_world > 1 || p.sequence_world > 1)
    return "heads or tokens over several ranks are for host tensors";
  if (p.state_dim > widest || p.head_dim > widest)
    return fmt::format("N = {}, P = {}: at most {}", p.state_dim, p.head_dim, widest);
  if (p.rank > most_rank) return fmt::format("R = {}: at most {}", p.rank, most_rank);
  if (p.options.chunk * p.rank > cuda::most_rows)
    return fmt::format("chunk = {} tokens of rank {}: {} rows; at most {}", p.options.chunk, p.rank,
                       p.options.chunk * p.rank, cuda::most_rows);
  return std::nullopt;
}

Planned plan(const Problem& p, const DeviceFacts& d) {
  const cuda::Plan made = cuda::make_plan(p, d);
  const double flops = useful_flops(p, made.chunk) * (p.backward() ? 4.0 / 3 : 1);
  Planned all = planned(cuda::workspace_of(p, made), flops, made);
  all.kept_bytes = cuda::saved_of(p, made);
  return all;
}

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  const auto& made = planned.as<cuda::Plan>();
  const cuda::ChunkPlaces& places = p.backward() ? made.backward : made.forward;
  std::vector<std::string> said = {
      fmt::format("operands = {}", cuda::name_of(made.engine)),
      fmt::format("chunk = {} tokens, {} rows", made.chunk, made.chunk * p.rank),
      fmt::format("shared memory = {} bytes, scratch = {} bytes a block", places.shared_bytes,
                  places.scratch_bytes)};
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
  const cuda::ChunkPlaces& places = p.backward() ? made.backward : made.forward;
  const cuda::Place state = p.backward() ? places.wide_upstream : places.wide_state;
  r.state_home = state.at >= 0 ? "shared memory" : "workspace";
  r.state_dtype = "fp32";
  r.accumulator_angle = "64-bit integers of 2^-64 turn, fp32 increments";
  r.accumulator_decay = "fp64 within a chunk, used as two fp32";
  r.accumulator_state = r.accumulator_state_gradient = r.accumulator_rows = "fp32";
  r.accumulator_parameters = "fp32 within a chunk, fp64 across chunks and sequences";
  r.accumulator_groups = "fp32 in the order of the heads, biases before";
  r.notes.push_back(std::string("operands: ") + cuda::name_of(made.engine));
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
  cuda::GeneralMachine machine(at);
  cuda::check_sequences(c, at, machine);
  cuda::run_pass(machine, c, made, buffers);
  record(c, made);
}

}  // namespace

Lane cuda_lane() {
  return {.name = "cuda",
          .kind = "native kernel",
          .runs_on = DeviceKind::cuda,
          .decline = decline,
          .plan = plan,
          .details = details,
          .run = run};
}

}  // namespace talea::mamba3
