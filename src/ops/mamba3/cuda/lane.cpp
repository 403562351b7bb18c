// What: the table entry of lane cuda: chunks of a head on tensor cores, a block a head.
// Why: every option on any NVIDIA GPU from sm_80.
// Never: declines in silence, or holds more than the workspace limit.
#include "ops/mamba3/rows/lane.hpp"

#include <fmt/format.h>

#include "ops/mamba3/cuda/machine.hpp"
#include "ops/mamba3/ranks.hpp"
#include "ops/mamba3/rows/step.hpp"

namespace talea::mamba3 {
namespace {

class GeneralMachine final : public cuda::DeviceMachine {
 public:
  using DeviceMachine::DeviceMachine;
  void forward(const cuda::Args& a) override {
    if (a.size.step) return cuda::launch_step(a, at_.stream);
    cuda::launch_forward(at_, a);
  }
  void begin_units(const cuda::Args& a, const cuda::Wave& w) override {
    cuda::launch_begin(at_, a, w);
  }
  void segment_states(const cuda::Args& a, const cuda::Wave& w) override {
    cuda::launch_segment(at_, a, w);
  }
  void slice_back(const cuda::Args& a, const cuda::Wave& w) override {
    cuda::launch_back(at_, a, w);
  }
};

constexpr int64_t widest = 256, most_rank = 8;

std::optional<std::string> decline(const Problem& p, const DeviceFacts& d) {
  if (auto why = cuda::declined_place(p, d)) return why;
  if (d.sm < 80) return fmt::format("sm_{}: needs sm_80 or later", d.sm);
  if (p.dtype == DType::f64) return "fp64 q: lane reference computes it, on the host";
  if (p.state_dim > widest || p.head_dim > widest)
    return fmt::format("N = {}, P = {}: at most {}", p.state_dim, p.head_dim, widest);
  if (p.rank > most_rank) return fmt::format("R = {}: at most {}", p.rank, most_rank);
  if (p.options.chunk * p.rank > cuda::most_rows)
    return fmt::format("chunk = {} tokens of rank {}: {} rows; at most {}", p.options.chunk, p.rank,
                       p.options.chunk * p.rank, cuda::most_rows);
  return std::nullopt;
}

Planned plan(const Problem& p, const DeviceFacts& d) {
  return cuda::planned_bytes(p, cuda::make_plan(p, d));
}

std::vector<std::string> details(const Problem& p, const Planned& planned) {
  if (p.pass == Pass::step) return cuda::step_details();
  const auto& made = alone<cuda::Plan>(planned);
  const cuda::ChunkPlaces& places = p.backward() ? made.backward : made.forward;
  std::vector<std::string> said = {
      fmt::format("operands = {}", cuda::name_of(made.engine)),
      fmt::format("chunk = {} tokens, {} rows", made.chunk, made.chunk * p.rank),
      fmt::format("shared memory = {} bytes, scratch = {} bytes a block", places.shared_bytes,
                  places.scratch_bytes)};
  cuda::append_backward(said, p, made);
  return said;
}

void run(const Call& c, const Planned& planned) {
  const auto& made = planned.as<cuda::Plan>();
  cuda::run_passes<GeneralMachine>(c, made);
  const bool backward = c.problem.backward();
  const cuda::ChunkPlaces& places = backward ? made.backward : made.forward;
  const cuda::Place state = backward ? places.wide_upstream : places.wide_state;
  cuda::record(c, made, state.at >= 0 ? "shared memory" : "workspace",
               "fp32 within a chunk, fp64 across chunks and sequences");
}

}  // namespace

Lane cuda_lane() {
  return over_ranks<plan, run>({.name = "cuda",
                                .kind = "native kernel",
                                .runs_on = DeviceKind::cuda,
                                .decline = decline,
                                .details = details});
}

}  // namespace talea::mamba3
