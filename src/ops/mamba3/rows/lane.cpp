// What: see lane.hpp.
// Why: one text for what every device lane says of itself.
// Never: launches a kernel.
#include "ops/mamba3/rows/lane.hpp"

#include <fmt/format.h>

namespace talea::mamba3::cuda {

std::optional<std::string> declined_place(const Problem& p, const DeviceFacts& d) {
  if (p.device != DeviceKind::cuda) return "host tensors: this lane reads device memory";
  if (d.cuda_devices == 0) return d.cuda_problem.empty() ? "no CUDA device" : d.cuda_problem;
  return std::nullopt;
}

Planned planned_bytes(const Problem& p, const Plan& made) {
  const double flops = useful_flops(p, made.chunk) * (p.backward() ? 4.0 / 3 : 1);
  Planned all = planned(workspace_of(p, made), flops, made);
  all.kept_bytes = saved_of(p, made);
  return all;
}

std::vector<std::string> step_details() {
  return {"operands = fp32", "no chunk", "state = registers, read once"};
}

void append_backward(std::vector<std::string>& said, const Problem& p, const Plan& made) {
  if (!p.backward()) return;
  said.push_back(fmt::format("segment = {} chunks, slice = {} chunks", made.segment, made.slice));
  said.push_back(fmt::format("wave = {} sequences", made.wave));
}

void record(const Call& c, const Plan& made, const char* state_home, const char* parameters) {
  const Problem& p = c.problem;
  Result& r = c.result;
  r.schedule = made.stretch > 0 ? Schedule::parallel : Schedule::sequential;
  r.chunk_tokens = made.chunk;
  r.chunk_rows = made.chunk * p.rank;
  r.segment_chunks = kept_every(made);
  const bool step = p.pass == Pass::step;
  r.state_home = step ? "registers" : state_home;
  r.state_dtype = "fp32";
  r.accumulator_angle = "64-bit integers of 2^-64 turn, fp32 increments";
  r.accumulator_decay = "fp64 within a chunk, used as two fp32";
  r.accumulator_state = r.accumulator_state_gradient = r.accumulator_rows = "fp32";
  r.accumulator_parameters = parameters;
  r.accumulator_groups = "fp32 in the order of the heads, biases before";
  r.notes.push_back(std::string("operands: ") + (step ? "fp32" : name_of(made.engine)));
  if (!p.backward()) return;
  r.shared_product = "dO V^T once, used by dq, dk, d_dt, d_trap, d_d";
  r.notes.push_back(c.in.saved && made.uses_saved ? "states from `saved`" : "states computed anew");
}

}  // namespace talea::mamba3::cuda
