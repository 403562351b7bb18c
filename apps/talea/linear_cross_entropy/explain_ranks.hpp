// What: `talea explain --ranks R --nodes M`: what a call would cost over ranks that are not here.
// Why: the plan is asked for before the machines are rented.
// Never: runs anything; the rates are arguments, their defaults measured ones.
#pragma once

#include "ops/linear_cross_entropy/rank_model.hpp"
#include "options.hpp"

namespace talea::cli {

struct PlanFlags {
  int64_t ranks = 1, nodes = 1;
  bool sequence_parallel = false, dx_beside_dw = false;
  double product_tflops, link_gb, link_us, node_gb, node_us;

  PlanFlags();
  void add(CLI::App& sub);
  // Error(usage) for rates without a plan, and for what a plan would not read.
  void refuse_unread_rates(const CLI::App& sub) const;
};

// One line for 1, 2, 4, ... and R ranks, filled node by node.
void explain_ranks(const Context& context, const PlanFlags& plan,
                   const LinearCrossEntropyProblem& problem);

}  // namespace talea::cli
