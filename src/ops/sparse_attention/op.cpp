// What: the way through the operator: check, choose, workspace, run.
// Why: one table and one choose() serve the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <array>

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/fields.hpp"
#include "ops/sparse_attention/handshake.hpp"
#include "ops/sparse_attention/parts.hpp"
#include "ops/sparse_attention/sharded.hpp"

namespace talea::sparse_attention {

std::span<const Lane> lane_table() {
  static const std::array<Lane, 5> table = {sm90_lane(), cuda_lane(), cpu_lane(), unfused_lane(),
                                            reference_lane()};
  return table;
}

double product_flops(const Problem& p) {
  const auto d = [](int64_t n) { return static_cast<double>(n); };
  const double rows = d(p.batch) * d(p.queries);
  const double pairs = 2 * rows * d(p.slots) * d(p.heads);
  const double index = 2 * rows * d(p.index_heads) * d(p.index_dim);
  switch (p.pass) {
    case Pass::forward:
      return pairs * d(p.dim + p.value_dim);
    case Pass::backward:
      return pairs * d(3 * p.dim + 2 * p.value_dim + (p.has_saved ? 0 : p.dim + p.value_dim));
    case Pass::select:
      return index * d(p.keys);
    case Pass::index_loss: {
      const double keys = d(p.loss_keys == LossKeys::dense ? p.keys : p.slots);
      return index * keys * 3 + 2 * rows * keys * d(p.heads) * d(p.dim);
    }
  }
  return 0;
}

namespace {

struct Choice {
  const Lane* lane = nullptr;
  std::vector<LaneDecline> declined;
};

Choice choose(const Problem& p, const DeviceFacts& device) {
  Choice choice;
  const std::string& wanted = p.options.lane;
  const Problem local = local_problem(p);
  bool known = wanted == "auto";
  for (const Lane& lane : lane_table()) {
    const bool named = wanted == lane.name;
    known = known || named;
    if (choice.lane || (wanted != "auto" && !named)) continue;
    if (wanted == "auto" && std::string_view(lane.name) == "unfused") {
      choice.declined.push_back(
          {lane.name, "materialises the scores; only when asked for by name"});
      continue;
    }
    if (auto reason = lane.decline(local, device)) {
      choice.declined.push_back({lane.name, *reason});
      continue;
    }
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

int64_t needed(const Lane& lane, const Problem& p, const DeviceFacts& device) {
  return exchange_bytes(p) + lane.workspace_bytes(local_problem(p), device);
}

const char* word(Operands o) { return o == Operands::split ? "split" : "native"; }

Result start(const Lane& lane, const Choice& choice, const Problem& p, int64_t bytes) {
  Result r;
  r.pass = p.pass;
  r.lane = lane.name;
  r.lane_kind = lane.kind;
  r.declined = choice.declined;
  r.workspace_bytes = bytes;
  r.flops = product_flops(p);
  r.operands = word(p.options.operands);
  if (p.pass == Pass::backward) r.forward_repeated = !p.has_saved;
  if (p.wants_dkv || p.wants_dindex_k) r.dkv_sum = "deterministic";
  if (p.pass == Pass::select)
    r.selection_rule = "largest score, ties to the lower index, NaN first, -Inf never";
  return r;
}

Result call(const Planned& planned, const std::vector<NamedTensor>& tensors,
            const Workspace& workspace, const Ranks& ranks, Stream stream) {
  const Problem& p = planned.problem;
  const DeviceFacts device = gather_device_facts(p.device_index);
  Choice choice;
  const Lane& lane = chosen(p, device, choice);
  const int64_t bytes = needed(lane, p, device);
  require(workspace.bytes >= bytes && (workspace.data || bytes == 0), ErrorKind::usage,
          "workspace: {} bytes given, {} bytes needed by lane {}",
          workspace.data ? workspace.bytes : 0, bytes, lane.name);
  check_workspace(tensors, {workspace.data, bytes});
  Result result = start(lane, choice, p, bytes);
  Communicator& heads = ranks.heads ? *ranks.heads : self_communicator();
  Communicator& sequence = ranks.sequence ? *ranks.sequence : self_communicator();
  Communicator& batch = ranks.batch ? *ranks.batch : self_communicator();
  if (ranks.handshake) shake_hands(p, planned.args, lane.name, heads, sequence);
  SlotFacts facts;
  if (p.device == DeviceKind::cpu) {
    check_data(p, planned.args);
    facts = examine(p, planned.args);
    if (planned.args.indices) {
      result.slots_given = facts.given;
      result.slots_valid = facts.valid;
      result.slots_foreign = facts.foreign;
      result.slots_absent = facts.given - facts.valid;
      result.first_foreign_slot = facts.first_slot;
      result.first_foreign_value = facts.first_value;
    }
  }
  run_sharded(
      lane,
      {p, device, planned.args, {workspace.data, bytes}, heads, sequence, batch, stream, result});
  if (p.device == DeviceKind::cpu)
    add_to_status(planned.args.status, facts, std::max<int64_t>(result.nan_scores, 0));
  return result;
}

template <typename In, typename InFields, typename Out, typename OutFields>
std::vector<NamedTensor> both(const In& in, const InFields& in_fields, const Out& out,
                              const OutFields& out_fields) {
  std::vector<NamedTensor> list = named(in, in_fields);
  for (const NamedTensor& n : named(out, out_fields)) list.push_back(n);
  return list;
}

}  // namespace

int64_t workspace_bytes(const Problem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  Choice choice;
  return needed(chosen(problem, device, choice), problem, device);
}

LaneChoice explain(const Problem& problem) {
  const DeviceFacts device = gather_device_facts(problem.device_index);
  const Choice choice = choose(problem, device);
  LaneChoice said;
  said.declined = choice.declined;
  if (!choice.lane) return said;
  said.lane = choice.lane->name;
  said.lane_kind = choice.lane->kind;
  said.workspace_bytes = needed(*choice.lane, problem, device);
  said.flops = product_flops(problem);
  said.details = choice.lane->details(local_problem(problem), device);
  return said;
}

std::vector<std::string> lanes() {
  std::vector<std::string> names;
  for (const Lane& lane : lane_table()) names.emplace_back(lane.name);
  return names;
}

Result forward(const Inputs& inputs, const Outputs& outputs, const Options& options,
               Workspace workspace, const Ranks& ranks, Stream stream) {
  return call(plan(Pass::forward, inputs, outputs, options, ranks),
              both(inputs, input_fields, outputs, output_fields), workspace, ranks, stream);
}

Result backward(const Inputs& inputs, const Outputs& outputs, const Options& options,
                Workspace workspace, const Ranks& ranks, Stream stream) {
  return call(plan(Pass::backward, inputs, outputs, options, ranks),
              both(inputs, input_fields, outputs, output_fields), workspace, ranks, stream);
}

Result select(const SelectInputs& inputs, const SelectOutputs& outputs,
              const SelectOptions& options, Workspace workspace, const Ranks& ranks,
              Stream stream) {
  return call(plan(inputs, outputs, options, ranks),
              both(inputs, select_input_fields, outputs, select_output_fields), workspace, ranks,
              stream);
}

Result index_loss(const IndexLossInputs& inputs, const IndexLossOutputs& outputs,
                  const IndexLossOptions& options, Workspace workspace, const Ranks& ranks,
                  Stream stream) {
  return call(plan(inputs, outputs, options, ranks),
              both(inputs, index_loss_input_fields, outputs, index_loss_output_fields), workspace,
              ranks, stream);
}

}  // namespace talea::sparse_attention
