// What: the lane table of the scan, and its public functions.
// Why: one table serves the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <array>

#include "core/fail.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/ranks.hpp"
#include "ops/mamba3/saved.hpp"

namespace talea::mamba3 {

std::span<const Lane> Operator::lanes() {
  static const std::array<Lane, 5> table = {sm90_lane(), cuda_lane(), cpu_lane(), unfused_lane(),
                                            reference_lane()};
  return table;
}

namespace {

// Where and with whom a call runs; slots: of a step.
struct Place {
  Workspace workspace;
  Ranks ranks;
  Stream stream;
  Tensor slots = {};
};

std::vector<NamedTensor> memory_of(const Inputs& in, const Outputs& out) {
  std::vector<NamedTensor> all = tensors_of(in);
  for (const NamedTensor& t : tensors_of(out)) all.push_back(t);
  return all;
}

// describe: throws what is wrong with the call.
template <class Describe>
Result run(Describe describe, const Inputs& in, const Outputs& out, const Place& at) {
  std::array<Meeting, 2> meetings = meetings_of(at.ranks);
  std::vector<NamedTensor> memory = memory_of(in, out);
  memory.push_back({"slots", &at.slots});
  const auto run_lane = [&](const Prepared<Operator>& ready, Result& result) {
    const Problem& p = ready.problem;
    result.pass = p.pass;
    result.rotary_pairs = p.rotary_pairs;
    result.memory_order = memory_order_of(p);
    FullAxes full = full_axes(p, in, out);
    take_saved(p, ready.lane->name, ready.plan, full, result);
    shake_hands(p, in, ready.lane->name, meetings, result);
    const Workspace room = {at.workspace.data, ready.plan.workspace_bytes};
    ready.lane->run(
        {p, ready.device, full.in, full.out, at.slots, room, at.ranks, at.stream, result},
        ready.plan);
    if (!p.backward())
      result.accumulator_state_gradient = result.accumulator_rows = result.accumulator_parameters =
          result.accumulator_groups = result.shared_product = not_requested;
    if (p.options.schedule == Schedule::parallel && result.schedule != Schedule::parallel)
      result.notes.push_back(
          "schedule = parallel: the chunks of a head went in turn; lane cpu takes them side by "
          "side "
          "where the limit holds a segment of them");
  };
  return together(meetings,
                  [&] { return call<Operator>(describe(), at.workspace, memory, run_lane); });
}

}  // namespace

int64_t workspace_bytes(const Problem& problem) {
  return prepare<Operator>(problem).plan.workspace_bytes;
}

int64_t saved_bytes(const Problem& problem) { return saved_size(prepare<Operator>(problem).plan); }

int64_t least_workspace_limit(const Problem& problem) { return least_limit<Operator>(problem); }

LaneChoice explain(const Problem& problem) { return talea::explain<Operator>(problem); }

std::vector<std::string> lanes() { return lane_names<Operator>(); }

double useful_flops(const Problem& p, int64_t chunk) {
  const auto real = [](int64_t x) { return static_cast<double>(x); };
  const double r = real(p.rank), n = real(p.state_dim), d = real(p.head_dim);
  const double heads = real(p.batch) * real(p.tokens) * real(p.heads);
  const double rows = chunk > 0 ? real(chunk) * r : 64;
  const double forward = 2 * rows * r * (n + d) + 4 * r * n * d;
  if (p.pass == Pass::step) return heads * 4 * r * n * d;
  return heads * (p.backward() ? 3 : 1) * forward;
}

Result forward(const Inputs& in, const Outputs& out, const Options& options, Workspace workspace,
               const Ranks& ranks, Stream stream) {
  return run([&] { return describe(Pass::forward, in, out, options, ranks); }, in, out,
             {workspace, ranks, stream});
}

Result backward(const Inputs& in, const Outputs& out, const Options& options, Workspace workspace,
                const Ranks& ranks, Stream stream) {
  return run([&] { return describe(Pass::backward, in, out, options, ranks); }, in, out,
             {workspace, ranks, stream});
}

Result step(const StepArguments& a, const Options& options, Workspace workspace, Stream stream) {
  return run([&] { return describe(a, options); }, step_inputs(a), step_outputs(a),
             {workspace, {}, stream, a.slots});
}

void require_clean(const int64_t status[4]) {
  require(status[0] == 0, ErrorKind::invalid_data,
          "cu_seqlens: {} bad entries, the first one entry {} = {}", status[0], status[1],
          status[2]);
  require(status[3] == 0, ErrorKind::invalid_data, "slots: {} bad entries", status[3]);
}

}  // namespace talea::mamba3
