// What: the lane table of linear cross-entropy, and its public functions.
// Why: one table serves the library, the C interface and the command line.
// Never: includes a CUDA header or knows how a lane works.
#include <array>

#include "ops/linear_cross_entropy/contract.hpp"
#include "ops/linear_cross_entropy/fields.hpp"
#include "ops/linear_cross_entropy/handshake.hpp"

namespace talea {

std::span<const lce::Lane> lce::Operator::lanes() {
  static const std::array<Lane, 5> table = {sm90_lane(), cuda_lane(), cpu_lane(), unfused_lane(),
                                            reference_lane()};
  return table;
}

LinearCrossEntropyProblem describe(const LinearCrossEntropyInputs& inputs,
                                   const LinearCrossEntropyOutputs& outputs,
                                   const LinearCrossEntropyOptions& options,
                                   const LinearCrossEntropyRanks& ranks) {
  return lce::describe(inputs, outputs, options, ranks);
}

int64_t workspace_bytes(const LinearCrossEntropyProblem& problem) {
  return prepare<lce::Operator>(problem).plan.workspace_bytes;
}

// Of the plan under the limit, which is not judged here: the call does, with the rest in place.
int64_t rest_bytes(const LinearCrossEntropyProblem& problem) {
  lce::Problem asked = problem;
  asked.rest_bytes = 0;
  const Prepared<lce::Operator> ready = choose_lane<lce::Operator>(asked);
  const lce::Problem limited = lce::Operator::limited(*ready.lane, asked, ready.device, nullptr);
  return ready.lane->plan(limited, ready.device).kept_bytes;
}

LaneChoice explain(const LinearCrossEntropyProblem& problem) {
  return explain<lce::Operator>(problem);
}

std::vector<std::string> linear_cross_entropy_lanes() { return lane_names<lce::Operator>(); }

std::vector<LaneInfo> linear_cross_entropy_lane_table() {
  std::vector<LaneInfo> table;
  for (const lce::Lane& lane : lce::Operator::lanes())
    table.push_back({lane.name, lane.kind, lane.runs_on, lane.reach == Reach::by_name});
  return table;
}

// Host lanes count the rows that they multiplied; on a device their number is not read.
static double products_of(lce::Problem p, const lce::Result& r) {
  if (p.device == DeviceKind::cpu && r.valid_tokens >= 0) p.tokens = r.valid_tokens;
  const double one = lce::product_flops_of_one(p);
  return one > 0 ? r.flops / one : 0;
}

// What was given and has no part in the result: nothing is left out in silence.
static void note_unused(const lce::Options& o, lce::Result& r) {
  if (o.reduction == Reduction::mean) return;
  const std::string of = std::string(": of a mean; reduction = ") + word(o.reduction);
  if (o.denominator != Denominator::valid)
    r.notes.push_back(std::string("denominator = ") + word(o.denominator) + of);
  if (o.on_empty != OnEmpty::nan)
    r.notes.push_back(std::string("on_empty = ") + word(o.on_empty) + of);
}

LinearCrossEntropyResult linear_cross_entropy(const LinearCrossEntropyInputs& inputs,
                                              const LinearCrossEntropyOutputs& outputs,
                                              const LinearCrossEntropyOptions& options,
                                              Workspace workspace,
                                              const LinearCrossEntropyRanks& ranks, Stream stream) {
  Communicator& vocab = ranks.vocab ? *ranks.vocab : self_communicator();
  Communicator& batch = ranks.batch ? *ranks.batch : self_communicator();
  std::array<Meeting, 2> meetings = lce::meetings_of(ranks);
  Meeting &with_vocab = meetings[0], &with_batch = meetings[1];
  const auto run = [&](const Prepared<lce::Operator>& ready, lce::Result& result) {
    const lce::Problem& problem = ready.problem;
    if (problem.device == DeviceKind::cpu && (with_vocab.with_others() || with_batch.with_others()))
      lce::examine(problem, inputs);  // what the lane would find later, when others wait for it
    lce::shake_hands(problem, inputs, ready.lane->name, with_vocab, result);
    lce::shake_batch_hands(problem, inputs, with_batch, result);
    ready.lane->run(
        {problem, ready.device, inputs, outputs, workspace, vocab, batch, stream, result},
        ready.plan);
    result.products = products_of(problem, result);
    note_unused(problem.options, result);
    if (!problem.wants_dx) result.accumulator_dx = not_requested;
    if (!problem.wants_dw) result.accumulator_dw = not_requested;
  };
  return together(meetings, [&] {
    return call<lce::Operator>(lce::describe(inputs, outputs, options, ranks), workspace,
                               lce::memory_of(inputs, outputs), run);
  });
}

}  // namespace talea
