// What: planted bugs of sparse attention that its tests must kill, one switch a class of bug.
// Why: as core/mutant.hpp; an operator's list is its own, so that a new bug rebuilds only it.
// Never: present in a normal build: without TALEA_MUTANTS every switch is a constant false.
#pragma once

#include "core/planted.hpp"

namespace talea::sparse_attention {

// The names follow the museum of known bugs (docs/museum.md).
#define TALEA_SPARSE_ATTENTION_MUTANT_LIST(X)                                            \
  X(sa1_filler_read_as_a_key, "slot -1 names a row instead of none")                     \
  X(sa2_no_upper_bound, "an index beyond the keys names the last one")                   \
  X(sa3_list_of_the_neighbour, "two queries share the first one's list")                 \
  X(sa4_empty_row_divides, "a row without keys divides by zero")                         \
  X(sa5_length_not_cut, "a negative topk_length counts as K")                            \
  X(sa6_tail_keeps_a_key, "the tail of the last tile keeps an old key")                  \
  X(sa7_slot_against_keys, "a slot's place is compared with S_kv")                       \
  X(sa8_heads_without_bound, "the last of an odd number of heads reads another's query") \
  X(sa9_index_into_the_next_sequence, "a local index reaches into the next sequence")    \
  X(sa10_mask_marks_column_zero, "absent slots mark column 0 of the mask")               \
  X(sa11_plan_reads_data, "the plan of a call reads its first index")                    \
  X(sa12_workspace_kept, "a call works in the workspace of an earlier one")              \
  X(sa13_slots_behind_not_written, "slots behind the selected are not written")          \
  X(sa14_ties_overflow, "more ties at the border than a small buffer holds are dropped") \
  X(sa15_scores_in_half, "scores beyond fp16 are equal")                                 \
  X(sa16_ties_to_the_higher, "ties of the selection go to the higher index")             \
  X(sa17_slots_behind_are_zero, "slots behind the selected name key 0")                  \
  X(sa18_scale_exponent_only, "of a tile's scale the exponent alone is kept")            \
  X(sa19_logical_dtype_believed, "e4m3 rows pass for plain ones of q's dtype")           \
  X(sa20_scale_of_the_value_alone, "columns behind the value go without the scale")      \
  X(sa21_lse_in_base_two, "lse is in base 2")                                            \
  X(sa22_sink_missing_backward, "the sink is left out of backward's denominator")        \
  X(sa23_sink_overflows, "a sink near the end of fp32 makes NaN")                        \
  X(sa24_residual_ignored, "Delta comes from the 16-bit o alone")                        \
  X(sa25_dkv_in_16_bits, "dkv is added up in bf16")                                      \
  X(sa26_buffers_alias, "dP lies where the scores lie")                                  \
  X(sa27_sum_drops_elements, "the sum of dkv leaves out the last column of a row")       \
  X(sa28_order_by_threads, "the order of dkv depends on the threads")                    \
  X(sa29_grid_limit, "rows behind 65535 are not computed")                               \
  X(sa30_offset_32_bit, "an offset of a row is cut to 32 bits")                          \
  X(sa31_dimensions_hard_wired, "other dimensions than 576 are declined")                \
  X(sa32_max_starts_at_a_number, "the running maximum starts at -1e30")                  \
  X(sa33_absent_slot_has_logit_zero, "an absent slot weighs exp(0)")                     \
  X(sa34_length_ignored, "what stands behind topk_length takes part")                    \
  X(sa35_loss_not_divided, "the index loss is not divided by N")                         \
  X(sa36_causal_by_row_number, "the causal rule counts rows, not positions")             \
  X(sa37_scores_zero_in_long_rows, "index scores of far keys are 0")                     \
  X(sa38_d_lse_dropped, "the gradient of lse is dropped")                                \
  X(sa39_epsilon_in_the_loss, "an epsilon stands under the loss's normaliser")           \
  X(sa40_gradient_has_a_factor, "dq is larger by 0.5 percent")                           \
  X(few_own_reference, "device: few queries: a tile is weighed beside its own maximum")  \
  X(few_values_do_not_wait, "device: few queries: values are summed before the weights") \
  X(narrow_filled_early, "device: narrow rows: a tile is copied over before its products")

TALEA_PLANTED(TALEA_SPARSE_ATTENTION_MUTANT_LIST, Mutant)

}  // namespace talea::sparse_attention
