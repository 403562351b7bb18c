// What: a call whose heads or rows are cut over ranks, as one lane call on this rank between sums.
// Why: lanes know nothing of ranks; the exchanges and their buffers are written once.
// Never: exchanges where the world is one rank.
#pragma once

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

// The problem that the lane of this rank sees: all keys, fp32 sums that the ranks add up.
Problem local_problem(const Problem& p);

// Of the exchanges alone; the lane's own bytes come on top. 0 in a world of one.
int64_t exchange_bytes(const Problem& p);

using RunOnOneRank = void (*)(const Call&, const Planned&);
void run_sharded(const Call& call, const Planned& plan, RunOnOneRank run);

// A row of the lane table from a lane of one rank: Own has static decline, plan, details and run,
// which see the local problem. `row`: what it says of itself.
template <class Own>
Lane lane_of_ranks(Lane row) {
  row.decline = [](const Problem& p, const DeviceFacts& device) {
    return Own::decline(local_problem(p), device);
  };
  row.plan = [](const Problem& p, const DeviceFacts& device) {
    Planned plan = Own::plan(local_problem(p), device);
    plan.workspace_bytes += exchange_bytes(p);
    plan.flops = product_flops(p);
    return plan;
  };
  row.details = [](const Problem& p, const Planned& plan) {
    return Own::details(local_problem(p), plan);
  };
  row.run = [](const Call& call, const Planned& plan) { run_sharded(call, plan, Own::run); };
  return row;
}

}  // namespace talea::sparse_attention
