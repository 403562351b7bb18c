// What: the workspace limit: what counts against it, and which one auto is.
// Why: a caller who names none gets the smallest room that costs no time; ranks choose alike.
// Never: judges a limit: core/operator.hpp does.
#include <algorithm>

#include "core/fail.hpp"
#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/outputs.hpp"

namespace talea::lce {
namespace {

// Ranks choose and judge a limit alike, whatever shard each holds: by an even one.
Problem even_shard(Problem p) {
  if (p.world == 1) return p;
  p.vocab_local = p.vocab_stored = (p.vocab + p.world - 1) / p.world;
  if (p.wants_rest) p.rest_bytes = 0;  // asked for again
  return p;
}

// Bytes that auto may take: half of 16-bit logits and their gradient, an eighth of what is free.
// Ranks must choose alike, whatever else their devices hold: they go by the device's whole memory.
int64_t most_of_auto(const Problem& p, const DeviceFacts& device) {
  int64_t most = 2 * p.tokens * p.vocab_local;
  if (p.device != DeviceKind::cuda) return most;
  const int64_t room = p.world > 1 ? device.memory_bytes / 2 : free_device_bytes(p.device_index);
  if (room > 0) most = std::min(most, room / 8);
  return most;
}

int64_t taken_by(const Problem& p, const Planned& plan) {
  const int64_t rest = p.wants_rest && p.rest_bytes == 0 ? plan.kept_bytes : 0;
  return plan.workspace_bytes + kept_beside(p) + rest;
}

struct Rung {
  int64_t bytes;  // all that the plan takes
  double ms;      // 0: not known
};
Rung rung_at(int64_t limit, Problem& p, const Lane& lane, const DeviceFacts& device) {
  p.options.workspace_limit_bytes = limit;
  const Planned plan = lane.plan(p, device);
  return {taken_by(p, plan), plan.predicted_ms};
}

// The limit under auto: the smallest room whose plan is within 3 % of the fastest in reach.
int64_t chosen_limit(const Lane& lane, Problem p, const DeviceFacts& device) {
  // Predictions were seen to be 1.5 % off: plans within that are within 3 % when measured.
  constexpr int64_t customary = int64_t{256} << 20, small = int64_t{64} << 20, least = small / 4;
  int64_t most = most_of_auto(p, device);
  int64_t usual = std::min(most, customary);
  Rung first = rung_at(usual, p, lane, device);
  if (first.ms == 0) {
    // What waits for a late factor may leave a lane of this host next to nothing to work in.
    if (kept_beside(p) > usual - usual / 8) first = rung_at(usual = small, p, lane, device);
    return std::max(usual, first.bytes);
  }
  // Where no plan keeps that, the least one has too little room to be fast: of few tokens it went
  // through the vocabulary in many small pieces.
  const int64_t needed = rung_at(most, p, lane, device).bytes;
  if (needed > most) most = std::max(small, needed + needed / 4);
  std::vector<Rung> rungs;
  const auto add = [&](int64_t limit) {
    const Rung r = rung_at(limit, p, lane, device);
    if (r.bytes <= limit || rungs.empty()) rungs.push_back(r);
  };
  for (int64_t limit = least; limit < most; limit += std::max(limit / 8, least)) add(limit);
  add(most);
  double best = rungs[0].ms;
  for (const Rung& r : rungs) best = std::min(best, r.ms);
  for (const Rung& r : rungs)
    if (r.ms <= 1.015 * best) return r.bytes;
  return rungs[0].bytes;
}

}  // namespace

Problem Operator::limited(const Lane& lane, const Problem& p, const DeviceFacts& device,
                          const Workspace* given) {
  require(!p.wants_dx_rest || (lane.keeps_rest && lane.keeps_rest(p)), ErrorKind::usage,
          "dx_rest: lane {} keeps none for this problem", lane.name);
  if (p.options.workspace_limit_bytes != workspace_auto) return p;
  Problem q = p;
  // What is free on a device changes between the question and the call: the room given decides.
  const bool by_room = given && p.world == 1 && p.device == DeviceKind::cuda;
  q.options.workspace_limit_bytes =
      by_room ? given->bytes + kept_beside(p) : chosen_limit(lane, even_shard(p), device);
  return q;
}

int64_t Operator::taken(const Lane& lane, const Problem& p, const DeviceFacts& device,
                        const Planned& plan) {
  if (p.world == 1) return taken_by(p, plan);
  const Problem even = even_shard(p);
  return taken_by(even, lane.plan(even, device));
}

}  // namespace talea::lce
