// What: the way through the scan: check, choose, workspace, run.
// Why: one table and one choose() serve the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <algorithm>
#include <array>

#include "core/fail.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/ranks.hpp"
#include "ops/mamba3/saved.hpp"

namespace talea::mamba3 {

std::span<const Lane> lane_table() {
  static const std::array<Lane, 3> table = {cpu_lane(), unfused_lane(), reference_lane()};
  return table;
}

namespace {

struct Choice {
  const Lane* lane = nullptr;
  std::vector<LaneDecline> declined;
};

Choice choose(const Problem& p, const DeviceFacts& device) {
  Choice choice;
  const std::string& wanted = p.options.lane;
  bool known = wanted == "auto";
  for (const Lane& lane : lane_table()) {
    const bool named = wanted == lane.name;
    known = known || named;
    if (choice.lane || (wanted != "auto" && !named)) continue;
    if (wanted == "auto" && std::string_view(lane.name) == "unfused") {
      choice.declined.push_back(
          {lane.name, "materialises every intermediate; only when asked for by name"});
      continue;
    }
    if (auto reason = lane.decline(p, device))
      choice.declined.push_back({lane.name, *reason});
    else
      choice.lane = &lane;
  }
  require(known, ErrorKind::usage, "lane = {}: no such lane (sm90, cuda, cpu, unfused, reference)",
          wanted);
  return choice;
}

const Lane& chosen(const Problem& p, const DeviceFacts& device, Choice& choice) {
  choice = choose(p, device);
  std::string reasons;
  for (const LaneDecline& d : choice.declined)
    reasons += fmt::format("\n  {}: {}", d.lane, d.reason);
  require(choice.lane, ErrorKind::unavailable, "no lane takes this problem:{}", reasons);
  return *choice.lane;
}

Result call(const Problem& p, const Inputs& in, const Outputs& out, const Tensor& slots,
            Workspace workspace, const Ranks& ranks, Stream stream) {
  const DeviceFacts device = gather_device_facts(p.device_index);
  Choice choice;
  const Lane& lane = chosen(p, device, choice);
  const int64_t needed = ranked_workspace(p, lane, device);
  require(workspace.bytes >= needed && (workspace.data || needed == 0), ErrorKind::usage,
          "workspace: {} bytes given, {} bytes needed by lane {}",
          workspace.data ? workspace.bytes : 0, needed, lane.name);
  check_workspace(in, out, {workspace.data, needed});
  Result result;
  result.lane = lane.name;
  result.lane_kind = lane.kind;
  result.declined = choice.declined;
  result.pass = p.pass;
  result.rotary_pairs = p.rotary_pairs;
  result.workspace_bytes = needed;
  result.memory_order = memory_order_of(p);
  FullAxes full = full_axes(p, in, out);
  take_saved(p, lane, device, full, result);
  run_ranked(lane, {p, device, full.in, full.out, slots, workspace, stream, result}, ranks);
  return result;
}

}  // namespace

int64_t workspace_bytes(const Problem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  Choice choice;
  const Lane& lane = chosen(problem, device, choice);
  return ranked_workspace(problem, lane, device);
}

int64_t saved_bytes(const Problem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  Choice choice;
  return saved_size(problem, chosen(problem, device, choice), device);
}

LaneChoice explain(const Problem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  const Choice choice = choose(problem, device);
  LaneChoice said;
  said.declined = choice.declined;
  if (!choice.lane) return said;
  said.lane = choice.lane->name;
  said.lane_kind = choice.lane->kind;
  said.workspace_bytes = ranked_workspace(problem, *choice.lane, device);
  said.flops = useful_flops(problem, problem.options.chunk);
  said.details = choice.lane->details(problem, device);
  return said;
}

std::vector<std::string> lanes() {
  std::vector<std::string> names;
  for (const Lane& lane : lane_table()) names.emplace_back(lane.name);
  return names;
}

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
  const Problem p = describe(Pass::forward, in, out, options, ranks);
  return call(p, in, out, {}, workspace, ranks, stream);
}

Result backward(const Inputs& in, const Outputs& out, const Options& options, Workspace workspace,
                const Ranks& ranks, Stream stream) {
  const Problem p = describe(Pass::backward, in, out, options, ranks);
  return call(p, in, out, {}, workspace, ranks, stream);
}

Result step(const StepArguments& a, const Options& options, Workspace workspace, Stream stream) {
  const Problem p = describe(a, options);
  return call(p, step_inputs(a), step_outputs(a), a.slots, workspace, {}, stream);
}

void require_clean(const int64_t status[4]) {
  require(status[0] == 0, ErrorKind::invalid_data,
          "cu_seqlens: {} bad entries, the first one entry {} = {}", status[0], status[1],
          status[2]);
  require(status[3] == 0, ErrorKind::invalid_data, "slots: {} bad entries", status[3]);
}

}  // namespace talea::mamba3
