// What: the operator layer: a table of lanes, the choice among them, and the way into a call.
// Why: every operator chooses, plans, explains and runs in the same way; what it computes is its
// own.
// Never: knows an operator or a lane, keeps a registry, or takes a decision twice in a call.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device_facts.hpp"
#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "core/views.hpp"
#include "talea/call.hpp"

namespace talea {

// A lane's decision on one problem, taken once a call and handed to its run().
struct Planned {
  int64_t workspace_bytes = 0;
  double flops = 0;                         // of the matrix products that will run
  std::shared_ptr<const void> config = {};  // the lane's own; absent where it has nothing to decide
  double predicted_ms = 0;  // to compare plans of this lane under several limits; 0: not known
  int64_t kept_bytes = 0;   // what the caller is asked to keep beside the workspace for later

  template <class Config>
  const Config& as() const {
    return *static_cast<const Config*>(config.get());
  }
};

template <class Config>
Planned planned(int64_t workspace_bytes, double flops, Config config) {
  return {.workspace_bytes = workspace_bytes,
          .flops = flops,
          .config = std::make_shared<const Config>(std::move(config))};
}

// What a result says of what nobody asked the call for (docs/receipts.md).
inline constexpr const char* not_requested = "not requested";

// Whether lane = auto considers a lane, or only its name reaches it.
enum class Reach { automatic, by_name };

// One row of an operator's table. Op has the types Problem (with options.lane and device_index),
// Call and Result, and a static lanes(): its table, best first, reference last.
template <class Op>
struct Lane {
  using Problem = typename Op::Problem;
  using Reason = std::optional<std::string>;

  const char* name = "";
  const char* kind = "";  // "native kernel", "library composition", "reference", ...
  DeviceKind runs_on = DeviceKind::cpu;
  Reach reach = Reach::automatic;
  const char* by_name_why = "";  // with Reach::by_name: why auto passes it by
  // Nothing: accepts. Otherwise the reason, which names the option, shape or device at fault.
  Reason (*decline)(const Problem&, const DeviceFacts&) = nullptr;
  Planned (*plan)(const Problem&, const DeviceFacts&) = nullptr;
  // One "name = value" a line: tile, chunk, schedule. Apart from plan(), because a call needs no
  // text.
  std::vector<std::string> (*details)(const Problem&, const Planned&) = nullptr;
  void (*run)(const typename Op::Call&, const Planned&) = nullptr;
  // Nothing, or why under lane = auto another lane that accepts should come before this one.
  Reason (*yields)(const Problem&) = nullptr;
  // Whether it can keep what rounding left of an output, for a later factor; null: never.
  bool (*keeps_rest)(const Problem&) = nullptr;
};

// A lane that this build does not have: it stays in the table, and says so.
template <class Op>
Lane<Op> absent_lane(const char* name, DeviceKind runs_on) {
  return {
      .name = name,
      .kind = "not built",
      .runs_on = runs_on,
      .decline = [](const typename Op::Problem&, const DeviceFacts&) -> std::optional<std::string> {
        return "not built: this library was built without CUDA";
      }};
}

template <class Op>
std::vector<std::string> lane_names() {
  std::vector<std::string> names;
  for (const Lane<Op>& lane : Op::lanes()) names.emplace_back(lane.name);
  return names;
}

template <class Op>
struct Choice {
  const Lane<Op>* lane = nullptr;  // null: none accepts
  std::vector<LaneDecline> declined;
};

// The first lane that accepts and does not yield to a later one; or the one that is named.
template <class Op>
Choice<Op> choose(const typename Op::Problem& p, const DeviceFacts& device) {
  Choice<Op> choice;
  LaneDecline yielded;
  const Lane<Op>* second = nullptr;
  const std::string& wanted = p.options.lane;
  const bool automatic = wanted == "auto";
  bool known = automatic;
  std::string names;
  for (const Lane<Op>& lane : Op::lanes()) {
    names += (names.empty() ? "" : ", ") + std::string(lane.name);
    const bool named = wanted == lane.name;
    known = known || named;
    if (choice.lane || !(automatic || named)) continue;
    if (automatic && lane.reach == Reach::by_name) {
      choice.declined.push_back({lane.name, lane.by_name_why});
    } else if (auto reason = lane.decline(p, device)) {
      choice.declined.push_back({lane.name, *reason});
    } else if (auto why = lane.yields && automatic ? lane.yields(p) : std::nullopt) {
      second = &lane;
      yielded = {lane.name, *why};
    } else {
      choice.lane = &lane;
    }
  }
  if (second && choice.lane) choice.declined.push_back(yielded);
  if (!choice.lane) choice.lane = second;
  require(known, ErrorKind::usage, "lane = {}: no such lane ({})", wanted, names);
  return choice;
}

// A problem's lane with its decision.
template <class Op>
struct Prepared {
  DeviceFacts device = {};
  const Lane<Op>* lane = nullptr;
  std::vector<LaneDecline> declined = {};
  typename Op::Problem problem = {};  // that of the plan: with its workspace limit as a number
  Planned plan = {};
};

// What counts against the limit: the workspace, unless Op says otherwise with
// taken(lane, problem, device, plan).
template <class Op>
int64_t taken_of_limit(const Lane<Op>& lane, const typename Op::Problem& p,
                       const DeviceFacts& device, const Planned& plan) {
  if constexpr (requires { Op::taken(lane, p, device, plan); })
    return Op::taken(lane, p, device, plan);
  else
    return plan.workspace_bytes;
}

// What a call on the host takes from the heap beside its workspace, at most: its result, the lanes'
// reasons, what OpenMP keeps of a team. Measured: 1.4 to 12.4 KB, by the threads.
template <class Problem>
int64_t beside_workspace(const Problem& p, const DeviceFacts& device) {
  if constexpr (requires { p.device, p.options.threads; }) {
    const int64_t threads = std::max(device.threads, p.options.threads);
    return p.device == DeviceKind::cpu ? (8 + threads) << 10 : 0;
  } else {
    return 0;
  }
}

// The least limit that the lane can keep: what its plan takes where there is no room at all.
template <class Op>
int64_t least_limit(const Lane<Op>& lane, typename Op::Problem p, const DeviceFacts& device) {
  p.options.workspace_limit_bytes = 0;
  return beside_workspace(p, device) + taken_of_limit(lane, p, device, lane.plan(p, device));
}

// The lane's decision, and the problem that it is for. A limit that the caller named is kept or is
// an error. Op may choose one for a caller who names none, with limited(lane, problem, device,
// given); `given`: the room of a call, null before one.
template <class Op>
void plan_within_limit(Prepared<Op>& ready, const typename Op::Problem& asked,
                       const Workspace* given = nullptr) {
  const Lane<Op>& lane = *ready.lane;
  ready.problem = asked;
  if constexpr (requires { Op::limited(lane, asked, ready.device, given); })
    ready.problem = Op::limited(lane, asked, ready.device, given);
  if constexpr (requires { asked.options.workspace_limit_bytes; }) {
    int64_t& limit = ready.problem.options.workspace_limit_bytes;
    const int64_t named = asked.options.workspace_limit_bytes;
    const bool chosen = limit != named;  // so that it is kept
    const int64_t beside = beside_workspace(asked, ready.device);
    if (!chosen) limit = std::max<int64_t>(limit - beside, 0);
    ready.plan = lane.plan(ready.problem, ready.device);
    if (chosen) {
      limit += beside;  // named, it gives the same plan
      return;
    }
    const int64_t taken = taken_of_limit(lane, ready.problem, ready.device, ready.plan) + beside;
    limit = named;
    if (taken <= named) return;
    fail(ErrorKind::usage,
         "workspace_limit = {} bytes: cannot be kept; for this problem lane {} needs at least {} "
         "bytes",
         named, lane.name, least_limit(lane, ready.problem, ready.device));
  } else {
    ready.plan = lane.plan(ready.problem, ready.device);
  }
}

// The lane without its decision. Throws Error(unavailable) with every lane's reason where none
// accepts.
template <class Op>
Prepared<Op> choose_lane(const typename Op::Problem& p) {
  Prepared<Op> ready{.device = gather_device_facts(p.device_index)};
  Choice<Op> choice = choose<Op>(p, ready.device);
  if (!choice.lane && p.options.lane != "auto" && mutant(Mutant::b13_silent_fallback)) {
    typename Op::Problem any = p;
    any.options.lane = "auto";
    choice = choose<Op>(any, ready.device);
  }
  std::string reasons;
  for (const LaneDecline& d : choice.declined)
    reasons += fmt::format("\n  {}: {}", d.lane, d.reason);
  require(choice.lane, ErrorKind::unavailable, "no lane takes this problem:{}", reasons);
  ready.lane = choice.lane;
  ready.declined = std::move(choice.declined);
  return ready;
}

// Of the lane that would run.
template <class Op>
int64_t least_limit(const typename Op::Problem& p) {
  const Prepared<Op> ready = choose_lane<Op>(p);
  return least_limit(*ready.lane, p, ready.device);
}

template <class Op>
Prepared<Op> prepare(const typename Op::Problem& p, const Workspace* given = nullptr) {
  Prepared<Op> ready = choose_lane<Op>(p);
  plan_within_limit(ready, p, given);
  return ready;
}

template <class Op>
LaneChoice explain(const typename Op::Problem& p) {
  Prepared<Op> ready{.device = gather_device_facts(p.device_index)};
  const Choice<Op> choice = choose<Op>(p, ready.device);
  LaneChoice said;
  said.declined = choice.declined;
  if (!choice.lane) return said;
  ready.lane = choice.lane;
  plan_within_limit(ready, p);
  said.lane = ready.lane->name;
  said.lane_kind = ready.lane->kind;
  said.workspace_bytes = ready.plan.workspace_bytes;
  said.flops = ready.plan.flops;
  if constexpr (requires { p.options.workspace_limit_bytes; })
    said.workspace_limit_bytes = ready.problem.options.workspace_limit_bytes;
  if (ready.lane->details) said.details = ready.lane->details(ready.problem, ready.plan);
  return said;
}

// One call: prepares, checks the workspace against the plan and against `memory` (every tensor of
// the call), writes into the result what any lane knows, and hands over to
// run(const Prepared<Op>&, Result&), which shakes hands with the ranks and runs the lane.
template <class Op, class Run>
typename Op::Result call(const typename Op::Problem& p, const Workspace& workspace,
                         std::span<const NamedTensor> memory, Run&& run) {
  const Prepared<Op> ready = prepare<Op>(p, &workspace);
  check_workspace(ready.lane->name, workspace, ready.plan.workspace_bytes, memory);
  typename Op::Result result;
  result.lane = ready.lane->name;
  result.lane_kind = ready.lane->kind;
  result.declined = ready.declined;
  result.workspace_bytes = ready.plan.workspace_bytes;
  result.flops = ready.plan.flops;
  run(ready, result);
  return result;
}

}  // namespace talea
