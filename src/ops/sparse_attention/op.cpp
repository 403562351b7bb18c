// What: the lane table of sparse attention, and its public functions.
// Why: one table serves the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <array>

#include "ops/sparse_attention/contract.hpp"
#include "ops/sparse_attention/fields.hpp"
#include "ops/sparse_attention/handshake.hpp"

namespace talea::sparse_attention {

std::span<const Lane> Operator::lanes() {
  static const std::array<Lane, 5> table = {sm90_lane(), cuda_lane(), cpu_lane(), unfused_lane(),
                                            reference_lane()};
  return table;
}

namespace {

// What every lane says alike; it overwrites what it does otherwise.
void start(const Problem& p, Result& r) {
  for (std::string* fact :
       {&r.kv_path, &r.delta_source, &r.accumulator_o, &r.accumulator_dq, &r.accumulator_dkv,
        &r.dkv_sum, &r.dkv_order, &r.selection_rule, &r.denominator_kind, &r.denominator_scope})
    *fact = not_requested;
  r.pass = p.pass;
  r.operands = word(p.options.operands);
  if (p.pass == Pass::backward) r.forward_repeated = !p.has_saved;
  if (p.wants_dkv || p.wants_dindex_k) r.dkv_sum = word(DkvSum::deterministic);
  if (p.pass == Pass::select)
    r.selection_rule = "largest score, ties to the lower index, NaN first, -Inf never";
}

// What was given and has no part in the result: nothing is left out in silence.
void note_unused(const Problem& p, Result& r) {
  const int64_t base = p.options.q_position_base;
  const auto note = [&](const std::string& what) { r.notes.push_back(what); };
  if (!p.options.causal) {
    if (p.has_positions) note("q_positions: without causal they bound nothing");
    if (base != 0)
      note(fmt::format("q_position_base = {}: without causal it bounds nothing", base));
    if (p.key_stride != 1)
      note(fmt::format("key_stride = {}: without causal it bounds nothing", p.key_stride));
  } else if (p.has_positions && base != 0) {
    note(fmt::format("q_position_base = {}: q_positions say where the queries are", base));
  }
}

// Lanes describe a pass as if all of its outputs were asked for.
void finish(const Problem& p, Result& r) {
  if (p.pass == Pass::forward) r.delta_source = not_requested;
  if (p.pass == Pass::backward && !r.forward_repeated) r.accumulator_o = not_requested;
  if (!p.wants_dq && !p.wants_dindex_q) r.accumulator_dq = not_requested;
  if (!p.wants_dkv && !p.wants_dindex_k) r.accumulator_dkv = r.dkv_order = not_requested;
}

SlotFacts count_slots(const CheckedCall& c, Result& r) {
  check_data(c.problem, c.args);
  const SlotFacts facts = examine(c.problem, c.args);
  if (!c.args.indices) return facts;
  r.slots_given = facts.given;
  r.slots_valid = facts.valid;
  r.slots_foreign = facts.foreign;
  r.slots_absent = facts.given - facts.valid;
  r.first_foreign_slot = facts.first_slot;
  r.first_foreign_value = facts.first_value;
  return facts;
}

// check: describes the call; throws what is wrong with it.
template <class Check>
Result run(Check check, const Workspace& workspace, const Ranks& ranks, Stream stream) {
  const auto of = [](Communicator* given) -> Communicator& {
    return given ? *given : self_communicator();
  };
  Communicator &heads = of(ranks.heads), &sequence = of(ranks.sequence), &batch = of(ranks.batch);
  Meetings meetings = meetings_of(ranks);
  return together(meetings, [&] {
    const CheckedCall c = check();
    const bool on_host = c.problem.device == DeviceKind::cpu;
    return call<Operator>(
        c.problem, workspace, c.memory, [&](const Prepared<Operator>& ready, Result& result) {
          const Problem& p = ready.problem;
          start(p, result);
          note_unused(p, result);
          const SlotFacts facts = on_host ? count_slots(c, result) : SlotFacts{};
          const std::string refused = refused_indices(p, facts);
          require(refused.empty(), ErrorKind::invalid_data, "{}", refused);
          shake_hands(c, ready.lane->name, meetings, result);
          const Workspace room = {workspace.data, ready.plan.workspace_bytes};
          ready.lane->run({p, ready.device, c.args, room, heads, sequence, batch, stream, result},
                          ready.plan);
          finish(p, result);
          if (on_host) add_to_status(c.args.status, facts, std::max<int64_t>(result.nan_scores, 0));
        });
  });
}

}  // namespace

int64_t workspace_bytes(const Problem& problem) {
  return prepare<Operator>(problem).plan.workspace_bytes;
}

int64_t least_workspace_limit(const Problem& problem) { return least_limit<Operator>(problem); }

LaneChoice explain(const Problem& problem) { return talea::explain<Operator>(problem); }

std::vector<std::string> lanes() { return lane_names<Operator>(); }

Result forward(const Inputs& inputs, const Outputs& outputs, const Options& options,
               Workspace workspace, const Ranks& ranks, Stream stream) {
  return run([&] { return checked(Pass::forward, inputs, outputs, options, ranks); }, workspace,
             ranks, stream);
}

Result backward(const Inputs& inputs, const Outputs& outputs, const Options& options,
                Workspace workspace, const Ranks& ranks, Stream stream) {
  return run([&] { return checked(Pass::backward, inputs, outputs, options, ranks); }, workspace,
             ranks, stream);
}

Result select(const SelectInputs& inputs, const SelectOutputs& outputs,
              const SelectOptions& options, Workspace workspace, const Ranks& ranks,
              Stream stream) {
  return run([&] { return checked(inputs, outputs, options, ranks); }, workspace, ranks, stream);
}

Result index_loss(const IndexLossInputs& inputs, const IndexLossOutputs& outputs,
                  const IndexLossOptions& options, Workspace workspace, const Ranks& ranks,
                  Stream stream) {
  return run([&] { return checked(inputs, outputs, options, ranks); }, workspace, ranks, stream);
}

}  // namespace talea::sparse_attention
