// What: the checks of the linear cross-entropy contract, and the facts of its targets.
// Why: every lane starts from the same checked problem; section 3 of the contract lives here.
// Never: computes a logit.
#pragma once

#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/rows/rule.hpp"

namespace talea::lce {

// Shapes, dtypes, options, overlap: all that needs no data. Throws Error.
Problem describe(const Inputs& in, const Outputs& out, const Options& options, const Ranks& ranks);

// What the targets, class and token weights say about the batch. Host tensors only.
struct TargetFacts {
  int64_t valid = 0, ignored = 0, out_of_range = 0, in_partition = 0;
  double class_weight_sum = 0;  // sum_v c_v
  double valid_weight = 0;      // sum of c_y over valid rows (rows with soft targets)
  double weighted = 0;          // the same times the token weight
};

// Row t of host targets. Rows without targets are valid.
RowKind row_kind(const Problem& p, const Inputs& in, int64_t t);

// Checks the data of host tensors (targets, class weights, soft ids) and sums them up. Throws under
// TargetCheck::checked and automatic, naming row and value.
TargetFacts examine(const Problem& p, const Inputs& in);

// M of the mean: the facts' sums, over the batch ranks where the scope is global; 1 for sum, none.
// Also turns the facts' counts into global ones for the emptiness rule.
struct Normaliser {
  double denominator = 1;
  double inverse = 1;
  bool empty = false;  // no valid row in the scope: gradients are exactly 0
};
Normaliser normaliser(const Problem& p, const TargetFacts& facts, Communicator& batch);

// The scalar loss from the sum of l_t.
double reduce_loss(const Problem& p, const Normaliser& m, double sum);

// How a scalar or per-token upstream is read: any stride, absent counts as 1.
double upstream_at(const Inputs& in, int64_t t);

// Writes denominators and counts into the result.
void record(const TargetFacts& facts, const Normaliser& m, Result& result);

}  // namespace talea::lce
