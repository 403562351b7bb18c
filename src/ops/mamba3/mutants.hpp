// What: planted bugs of the scan that its tests must kill, one switch a class of bug.
// Why: as core/mutant.hpp, whose list has the first of them; a new bug here rebuilds only the scan.
// Never: present in a normal build: without TALEA_MUTANTS every switch is a constant false.
#pragma once

#include "core/mutant.hpp"

namespace talea::mamba3 {

// The numbers are those of the museum of known bugs (docs/museum.md).
#define TALEA_MAMBA3_MUTANT_LIST(X)                                                          \
  X(m3_3_one_mask_of_three, "the product of dq is masked apart, without the same token")     \
  X(m3_6_rows_cut_as_if_by_groups, "summed rows of (r, g) are put where (g, r) has them")    \
  X(m3_10_whole_chunks_in_backward, "backward takes whole chunks only")                      \
  X(m3_11_one_token_refused, "a sequence of one token is an error")                          \
  X(m3_13_step_of_any_shape, "a step takes tensors with an axis of tokens")                  \
  X(m3_14_groups_as_heads_in_a_step, "a step reads the groups in turn")                      \
  X(m3_15_three_percent, "outputs are off by three percent")                                 \
  X(m3_17_angle_without_bound, "the angle handed on is not reduced")                         \
  X(m3_18_dt_rounded_forward_only, "dt is rounded to bf16 in gamma and b, not in gradients") \
  X(m3_19_masked_by_a_product, "decays of masked pairs are multiplied by 0, not left out")   \
  X(m3_21_rows_behind_the_end, "a sequence reads a row of the next one")                     \
  X(m3_23_initial_states_on_the_grid, "initial states count only where a chunk begins")      \
  X(m3_24_grid_over_the_pack, "chunks are laid over the pack, not over each sequence")       \
  X(m3_25_order_of_arrival, "rows of a group are summed in an order that changes")           \
  X(m3_26_rows_as_if_dense, "a slice is read as if its rows lay side by side")               \
  X(m3_27_offset_32_bit, "the offset of a row is cut to 32 bits")                            \
  X(m3_32_any_dtype, "an input of another dtype passes")                                     \
  X(m3_34_no_wide_backward, "backward declines wide heads")                                  \
  X(m3_final_key_in_decay, "the gradient of the final key counts among those of the decays") \
  X(m3_divided_by_its_decay, "what is left of a key comes from a quotient of decays")        \
  X(m3_state_of_another_slot, "a step updates the row of its number, not of its slot")       \
  X(m3_padding_not_cleared, "gradients of padding are left as they were")                    \
  X(m3_turns_of_other_ranks, "a rank's angles begin anew with its piece")                    \
  X(m3_2_bias_after_group_sum_siso, "device: heads of a group share one, kernel of R 1")     \
  X(m3_anchor_dropped_siso, "device: what lies behind a chunk is left out, kernel of R 1")   \
  X(m3_turned_back_forward_siso, "device: turned rows are turned once more, kernel of R 1")  \
  X(m3_gate_slope_dropped, "device: the slope of the gate is its sigmoid alone")             \
  X(m3_gate_slope_dropped_siso, "device: the same in the kernel of R 1, no projections")     \
  X(m3_gate_slope_dropped_projected, "device: the same in the kernel of R 1, projections")   \
  X(m3_round_not_reset, "device: a sequence begins with the state that crosses")             \
  X(m3_state_over_the_next_sequence, "device: a last state is the next one's first")         \
  X(m3_edge_of_the_sequence_before, "device: a first token has the last key before it")      \
  X(m3_tail_stored, "device: rows behind a sequence's end are stored")                       \
  X(m3_head_of_the_next_group, "device: a part has the first head of the next group")        \
  X(m3_part_of_the_next_group, "device: a sum has the first part of the next group")         \
  X(m3_state_turned_by_two_rows, "device: two rows of the state turn alike, kernel of R 1")  \
  X(m3_state_weighed_by_halves, "device: the state's later rows weigh as its first ones")    \
  X(m3_2_bias_after_group_sum_ranks, "device: heads of a group share one, R from 2 on")      \
  X(m3_anchor_dropped_ranks, "device: what lies behind a chunk is left out, R from 2 on")    \
  X(m3_turned_back_forward_ranks, "device: turned rows are turned once more, R from 2 on")   \
  X(m3_gate_slope_dropped_ranks, "device: the gate's slope is its sigmoid, R from 2 on")     \
  X(m3_rows_of_a_token_masked, "device: a row sees no later row of its token, R from 2 on")  \
  X(m3_place_not_exchanged, "device: tokens of the next run are formed where some are read") \
  X(m3_chain_of_the_place_beside, "device: a chain reads the place of the next segment")     \
  X(m3_gradients_of_the_place_before, "device: gradients read the place of the last ones")   \
  X(m3_sums_of_the_next_slice, "device: rows are summed to where the next slice has them")   \
  X(m3_tokens_of_the_round_before, "device: a round has the tokens of the one before")       \
  X(m3_rates_of_the_token_before, "device: shared angles are those of the token before")     \
  X(m3_rates_of_the_first_batch, "device: shared angles are those of the first batch")       \
  X(m3_pieces_of_sixteen, "device: pieces of turns have sixteen tokens, of R 8, too")        \
  X(m3_share_not_awaited, "device: y of the other part of N is read before it has come")     \
  X(m3_last_slab_alone, "device: turns and decays of a head are those of its last slab")     \
  X(m3_step_rows_of_the_turn_before, "device: a step works on rows of the turn before")      \
  X(m3_round_of_the_count_before, "plan: a round begins at the chunk of the one before")     \
  X(m3_one_place_of_tokens, "plan: tokens of the next run have the place of those read")     \
  X(m3_beside_beyond_the_limit, "plan: a second place of tokens, whatever the limit")        \
  X(m3_rates_beyond_the_limit, "plan: rates of shared angles, whatever the limit")           \
  X(m3_tokens_over_operands, "plan: tokens lie on operands that are not as large")

TALEA_PLANTED(TALEA_MAMBA3_MUTANT_LIST, ScanMutant)
// Beside the switches of the common list.
using talea::mutant;

}  // namespace talea::mamba3
