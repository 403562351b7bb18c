// What: a call shared by ranks: heads cut, tokens cut, or both, around a lane that knows neither.
// Why: pieces of a sequence merge like chunks; every lane takes part without a line of its own.
// Never: waits for another rank's scan, or lets a result depend on who arrived first.
#pragma once

#include <array>

#include "dist/agree.hpp"
#include "ops/mamba3/contract.hpp"

namespace talea::mamba3 {

// A lane's decision and work on a problem that it has alone.
using PlanAlone = Planned (*)(const Problem&, const DeviceFacts&);
using RunAlone = void (*)(const Call&, const Planned&);

// The decisions of every call that the lane gets of a call over ranks. Alone: `whole` is all.
struct RankedPlan {
  Planned whole, turns, summary, feedback;
};

Planned plan_over_ranks(PlanAlone plan, const Problem& p, const DeviceFacts& device);
void run_over_ranks(RunAlone run, const Call& call, const RankedPlan& plan);

// A lane of the table from one that knows no ranks.
template <PlanAlone plan, RunAlone run>
Lane over_ranks(Lane lane) {
  lane.plan = [](const Problem& p, const DeviceFacts& device) {
    return plan_over_ranks(plan, p, device);
  };
  lane.run = [](const Call& call, const Planned& planned) {
    run_over_ranks(run, call, planned.as<RankedPlan>());
  };
  return lane;
}

// The lane's own decision in what details() gets.
template <class Config>
const Config& alone(const Planned& planned) {
  return planned.as<RankedPlan>().whole.as<Config>();
}

// The ranks of the heads, then those of the sequence; nobody where the caller wants no handshake.
std::array<Meeting, 2> meetings_of(const Ranks& ranks);

// Shapes, options and pieces of all ranks, before any work.
void shake_hands(const Problem& p, const Inputs& in, const std::string& lane,
                 std::array<Meeting, 2>& meetings, Result& result);

}  // namespace talea::mamba3
