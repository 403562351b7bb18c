// What: the table of reproducers.
// Why: the command line, the tests and the docs list the same ones.
// Never: decides which of them count.
#include "repro/support/repro.hpp"

namespace talea::repro {

#define TALEA_REPRO_LIST(X)    \
  X(none_backward)             \
  X(transposed_input)          \
  X(gradient_in_16_bits)       \
  X(confident_tokens)          \
  X(dw_16bit_accumulator)      \
  X(padded_vocabulary)         \
  X(sentinel_target)           \
  X(local_smoothing)           \
  X(bias_per_block)            \
  X(running_max_zero)          \
  X(hopper_output_layer)       \
  X(dx_split_16bit)            \
  X(all_ignored)               \
  X(unordered_sum)             \
  X(second_backward)           \
  X(mamba_output_parity)       \
  X(losses_only_compared)      \
  X(probability_clamp)         \
  X(accumulation_window)       \
  X(invalid_target)            \
  X(nan_gate)                  \
  X(ce_parity_drift)           \
  X(tiles_normalise)           \
  X(tuned_twice)               \
  X(dropped_adapter)           \
  X(ratio_not_one)             \
  X(dx_chunks_in_bf16)         \
  X(index_mask_capture)        \
  X(sparse_dims)               \
  X(fp8_storage)               \
  X(sparse_backward_precision) \
  X(index_memory)              \
  X(shared_list_tile)          \
  X(empty_rows)                \
  X(selection_ties)            \
  X(scale_formats)             \
  X(sink_limits)               \
  X(grid_limit)                \
  X(mamba3_groups)             \
  X(mamba3_shared_product)     \
  X(mamba3_flat_tiles)         \
  X(mamba3_fp32_steps)         \
  X(mamba3_angles)             \
  X(mamba3_reset)              \
  X(mamba3_packed_states)      \
  X(mamba3_step_tail)          \
  X(mamba3_decode_groups)      \
  X(mamba3_context)

#define TALEA_REPRO_DECLARE(name) extern const Reproducer name;
TALEA_REPRO_LIST(TALEA_REPRO_DECLARE)

const std::vector<Reproducer>& all() {
#define TALEA_REPRO_ENTRY(name) name,
  static const std::vector<Reproducer> table = {TALEA_REPRO_LIST(TALEA_REPRO_ENTRY)};
  return table;
}

}  // namespace talea::repro
