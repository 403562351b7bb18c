// What: planted bugs of single kernels and passes, beside those of core/mutant.hpp.
// Why: a split sum, a gather, a wait or a second launch can each be wrong alone, and each must
// show.
// Never: present in a normal build: without TALEA_MUTANTS every switch is a constant false.
#pragma once

#include "core/planted.hpp"

namespace talea {

// "device: " stands before those that no lane of the host has a place for.
#define TALEA_KERNEL_MUTANT_LIST(X)                                                          \
  X(pass_run_twice, "the pass that turns logits into their gradient runs twice in place")    \
  X(backward_logit_rounded, "the backward pass rounds the logit that the forward did not")   \
  X(split_sum_dropped, "device: the last part of a row's split sum is left out")             \
  X(gather_row_before, "device: rows after the first are gathered from the one before")      \
  X(repair_left_out, "device: a row whose shift was too small is not repaired")              \
  X(sort_by_word_alone, "device: equal targets are sorted without their rows")               \
  X(wait_left_out, "device: the end of the rows does not wait for the product before")       \
  X(top_k_part_missed, "device: the last part of a row takes no part in its top-k")          \
  X(last_tile_misplaced, "device: a product's last column of tiles lands on the one before") \
  X(stage_released_early, "device: a stage is loaded again while it is being multiplied")    \
  X(target_row_missed, "device: the target's own row of the weight is left out of dX")       \
  X(ahead_wait_left_out, "device: the next chunk's logits do not wait for dW to have read")  \
  X(exponent_of_a_lane, "device: a block of dW has the exponent of one lane's share")        \
  X(slice_wait_left_out, "device: the next slice's logits do not wait for dW to have read")

TALEA_PLANTED(TALEA_KERNEL_MUTANT_LIST, KernelMutant)

}  // namespace talea
