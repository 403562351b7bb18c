// What: planted bugs that the test suite must kill, one switch a class of bug.
// Why: a test that no bug can fail is a defect; the kill table proves that ours can.
// Never: present in a normal build: without TALEA_MUTANTS every switch is a constant false.
#pragma once

#include "core/planted.hpp"

namespace talea {

// The names follow the museum of known bugs (docs/museum.md) where there is one.
#define TALEA_MUTANT_LIST(X)                                                                 \
  X(b1_upstream_first_only, "none backward reads only the first upstream gradient")          \
  X(b2_upstream_stride_ignored, "an expanded or strided upstream is read as contiguous")     \
  X(b3_transposed_as_contiguous, "a transposed input is read as contiguous")                 \
  X(b4_gradient_in_16_bits, "the fp32 gradient passes through a bf16 buffer")                \
  X(b5_subtract_one, "p - 1 of the target is formed by subtraction from a rounded p")        \
  X(b6_dw_16bit_accumulator, "dW is accumulated over chunks in bf16")                        \
  X(b7_padding_in_softmax, "padded vocabulary rows enter the softmax")                       \
  X(b8_sentinel_matches_padding, "an ignored or foreign target matches a padded column")     \
  X(b9_smoothing_local, "label smoothing over the local shard")                              \
  X(b10_offset_32_bit, "an element offset is cut to 32 bits")                                \
  X(b11_bias_twice, "the bias is added once per block of the hidden dimension")              \
  X(b12_max_starts_at_zero, "the running maximum starts at 0")                               \
  X(b13_silent_fallback, "a named lane that declines is replaced in silence")                \
  X(b14_dx_summed_in_16_bits, "dX is summed over vocabulary splits in bf16")                 \
  X(b15_input_overwritten, "a caller's input is used as scratch")                            \
  X(b16_all_ignored, "an all-ignored batch divides by zero in the gradient")                 \
  X(b17_unordered_sum, "a reduction's order depends on the threads")                         \
  X(b18_second_backward, "a second call scales the gradient of the first")                   \
  X(b19_dw_missing_when_dx_frozen, "dW is not computed when dX is not requested")            \
  X(b20_local_mean, "a local count divides where the global one was asked for")              \
  X(b22_probability_clamp, "-log(p + eps) instead of -log p")                                \
  X(b23_mean_of_means, "a window's given denominator gives way to the micro-batch's own")    \
  X(b24_invalid_leaves_denominator, "an invalid target leaves the denominator in silence")   \
  X(ignored_row_leaks, "an ignored row takes part in dW")                                    \
  X(zloss_outside_gradient, "the z-loss is in the loss but not in the gradient")             \
  X(class_weight_on_zloss, "the z-loss is scaled by the class weight")                       \
  X(softcap_no_derivative, "the derivative of the softcap is left out")                      \
  X(scale_missing_in_dw, "the logit scale is left out of dW")                                \
  X(topk_tie_highest, "ties of top-k go to the highest id")                                  \
  X(main_grad_overwritten, "dW overwrites the main gradient instead of adding")              \
  X(workspace_overrun, "more than the declared workspace is written")                        \
  X(logits_rounded, "logits are rounded to 16 bits before the softmax")                      \
  X(empty_piece_has_address, "a buffer of no bytes has the address of the next one")         \
  X(m3_1_groups_as_heads, "heads read their groups in turn, not in blocks")                  \
  X(m3_2_bias_after_group_sum, "heads of a group share one gradient of their biases")        \
  X(m3_5_steps_in_16_bits, "decays and steps in 16 bits pass in silence")                    \
  X(m3_7_angle_not_reset, "the angle runs on from one packed sequence to the next")          \
  X(m3_8_last_values_for_all, "every sequence gets its final v in the row of the last one")  \
  X(m3_9_empty_sequence_unset, "an empty sequence leaves its states unset")                  \
  X(m3_12_step_beyond_the_head, "a step writes beyond the last row of a head")               \
  X(m3_16_angle_in_16_bits, "the angle is kept in few bits from chunk to chunk")             \
  X(m3_20_decay_clamped, "a decay above 1 counts as 1")                                      \
  X(m3_22_initial_token_ignored, "the key and value handed over are not read")               \
  X(m3_b_of_the_next_sequence, "the last key of a sequence waits for the next sequence")     \
  X(m3_b_and_gamma_exchanged, "b and gamma are exchanged")                                   \
  X(m3_mimo_v_without_initial, "the gradient of mimo_v leaves out the initial state's part") \
  X(m3_final_key_without_turn, "the gradient of the final key is left out of the angle")     \
  X(m3_anchor_dropped, "what lies behind a chunk is left out of the gradient of its decays") \
  X(m3_diagonal_with_s, "the same token is weighed with s")                                  \
  X(m3_shared_angles_not_summed, "the gradient of shared angles is that of one head")        \
  X(m3_turned_back_forward, "gradients of turned rows are turned once more")                 \
  X(m3_merge_out_of_order, "a piece decays its own state, not the one before it")

TALEA_PLANTED(TALEA_MUTANT_LIST, Mutant)

}  // namespace talea
