// What: the way through the operator: check, choose, workspace, run.
// Why: one table and one choose() serve the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <array>

#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "ops/linear_cross_entropy/contract.hpp"
#include "ops/linear_cross_entropy/handshake.hpp"
#include "ops/linear_cross_entropy/views.hpp"

namespace talea {
namespace lce {

std::span<const Lane> lanes() {
  static const std::array<Lane, 5> table = {sm90_lane(), cuda_lane(), cpu_lane(), unfused_lane(),
                                            reference_lane()};
  return table;
}

namespace {

struct Choice {
  const Lane* lane = nullptr;
  std::vector<LaneDecline> declined;
};

Choice choose(const Problem& p, const DeviceFacts& device) {
  Choice choice;
  LaneDecline yielded;  // accepts, but a later lane that accepts is measured to be faster
  const Lane* second = nullptr;
  const std::string& wanted = p.options.lane;
  bool known = wanted == "auto";
  for (const Lane& lane : lanes()) {
    const bool named = wanted == lane.name;
    known = known || named;
    if (choice.lane) break;
    if (wanted != "auto" && !named) continue;
    if (wanted == "auto" && std::string_view(lane.name) == "unfused") {
      choice.declined.push_back(
          {lane.name, "materialises the logits; only when asked for by name"});
      continue;
    }
    if (auto reason = lane.decline(p, device)) {
      choice.declined.push_back({lane.name, *reason});
      continue;
    }
    if (const auto reason = lane.yields && wanted == "auto" ? lane.yields(p) : std::nullopt) {
      second = &lane;
      yielded = {lane.name, *reason};
      continue;
    }
    choice.lane = &lane;
  }
  if (second && choice.lane) choice.declined.push_back(yielded);
  if (!choice.lane) choice.lane = second;
  require(known, ErrorKind::usage, "lane = {}: no such lane (sm90, cuda, cpu, unfused, reference)",
          wanted);
  return choice;
}

const Lane& chosen(const Problem& p, const DeviceFacts& device, Choice& choice) {
  choice = choose(p, device);
  if (!choice.lane && p.options.lane != "auto" && mutant(Mutant::b13_silent_fallback)) {
    Problem any = p;
    any.options.lane = "auto";
    choice = choose(any, device);
  }
  std::string reasons;
  for (const LaneDecline& d : choice.declined)
    reasons += fmt::format("\n  {}: {}", d.lane, d.reason);
  require(choice.lane, ErrorKind::unavailable, "no lane takes this problem:{}", reasons);
  return *choice.lane;
}

// What the lane needs under the smallest limit that it can keep.
int64_t least_bytes(const Lane& lane, Problem p, const DeviceFacts& device) {
  p.options.workspace_limit_bytes = 0;
  return lane.workspace_bytes(p, device);
}

// Bytes needed. On the host a limit is kept or is an error; device lanes note what they exceed.
int64_t bytes_within_limit(const Lane& lane, const Problem& p, const DeviceFacts& device) {
  const int64_t bytes = lane.workspace_bytes(p, device), limit = p.options.workspace_limit_bytes;
  if (p.device == DeviceKind::cpu && bytes > limit)
    fail(ErrorKind::usage,
         "workspace_limit = {} bytes: cannot be kept; for this problem lane {} needs at least {} "
         "bytes",
         limit, lane.name, least_bytes(lane, p, device));
  return bytes;
}

double product_flops(const Problem& p) {
  const double one = 2.0 * static_cast<double>(p.tokens) * static_cast<double>(p.hidden) *
                     static_cast<double>(p.vocab_local);
  return one * (1 + (p.wants_dx ? 1 : 0) + (p.wants_dw ? 1 : 0));
}

}  // namespace
}  // namespace lce

LinearCrossEntropyProblem describe(const LinearCrossEntropyInputs& inputs,
                                   const LinearCrossEntropyOutputs& outputs,
                                   const LinearCrossEntropyOptions& options,
                                   const LinearCrossEntropyRanks& ranks) {
  return lce::describe(inputs, outputs, options, ranks);
}

int64_t workspace_bytes(const LinearCrossEntropyProblem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  lce::Choice choice;
  return lce::bytes_within_limit(lce::chosen(problem, device, choice), problem, device);
}

LaneChoice explain(const LinearCrossEntropyProblem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  lce::Choice choice = lce::choose(problem, device);
  LaneChoice said;
  said.declined = choice.declined;
  if (!choice.lane) return said;
  said.lane = choice.lane->name;
  said.lane_kind = choice.lane->kind;
  said.workspace_bytes = lce::bytes_within_limit(*choice.lane, problem, device);
  said.flops = lce::product_flops(problem);
  said.details = choice.lane->details(problem, device);
  return said;
}

std::vector<std::string> linear_cross_entropy_lanes() {
  std::vector<std::string> names;
  for (const lce::Lane& lane : lce::lanes()) names.emplace_back(lane.name);
  return names;
}

LinearCrossEntropyResult linear_cross_entropy(const LinearCrossEntropyInputs& inputs,
                                              const LinearCrossEntropyOutputs& outputs,
                                              const LinearCrossEntropyOptions& options,
                                              Workspace workspace,
                                              const LinearCrossEntropyRanks& ranks, Stream stream) {
  const lce::Problem problem = lce::describe(inputs, outputs, options, ranks);
  const DeviceFacts device = gather_device_facts(problem.device_index);
  lce::Choice choice;
  const lce::Lane& lane = lce::chosen(problem, device, choice);
  const int64_t needed = lce::bytes_within_limit(lane, problem, device);
  require(workspace.bytes >= needed && (workspace.data || needed == 0), ErrorKind::usage,
          "workspace: {} bytes given, {} bytes needed by lane {}",
          workspace.data ? workspace.bytes : 0, needed, lane.name);
  lce::check_workspace(inputs, outputs, {workspace.data, needed});
  LinearCrossEntropyResult result;
  result.lane = lane.name;
  result.lane_kind = lane.kind;
  result.declined = choice.declined;
  result.workspace_bytes = needed;
  result.flops = lce::product_flops(problem);
  Communicator& vocab = ranks.vocab ? *ranks.vocab : self_communicator();
  Communicator& batch = ranks.batch ? *ranks.batch : self_communicator();
  if (ranks.handshake) {
    lce::shake_hands(problem, inputs, lane.name, vocab, result);
    lce::shake_batch_hands(problem, inputs, batch, result);
  }
  lane.run({problem, device, inputs, outputs, workspace, vocab, batch, stream, result});
  return result;
}

}  // namespace talea
