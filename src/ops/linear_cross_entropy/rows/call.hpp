// What: from a call to what the kernels of the device lanes share of it, and its checks of data.
// Why: both lanes see the same inputs and refuse the same calls with the same words.
// Never: launches a kernel.
#pragma once

#include "ops/linear_cross_entropy/lane.hpp"
#include "ops/linear_cross_entropy/rows/tokens.hpp"

namespace talea::lce {

TokenRule token_rule(const Call& call);
TokenTerms token_terms(const Call& call);
TokenOutputs token_outputs(const Call& call);
// Of every row, but for what the facts add: M and the class weights.
LossTerms<double> loss_terms(const Problem& p);

// Communicators of more than one rank must speak to device memory.
void require_device(const Call& call);
// The one synchronisation of TargetCheck::checked: throws what the facts say of bad data, and fills
// the result's counts.
BatchFacts checked_facts(const Call& call, const BatchFacts* facts);

}  // namespace talea::lce
