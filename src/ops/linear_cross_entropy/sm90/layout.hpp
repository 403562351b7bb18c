// What: the workspace of lane sm90, laid out once for counting and once for the pointers.
// Why: the stated bytes and the bytes used cannot differ.
// Never: allocates.
#pragma once
#include <algorithm>

#include "algebra/top_k.hpp"
#include "core/arena.hpp"
#include "ops/linear_cross_entropy/sm90/config.hpp"
#include "ops/linear_cross_entropy/sm90/row_kernels.hpp"
#include "ops/linear_cross_entropy/sm90/split.hpp"

namespace talea::lce::sm90 {

inline constexpr int kSumParts = 256;  // partial column sums of the weight, added in order

// What does not depend on the chunk.
inline void lay_out_tokens(const Problem& p, const Config& c, Arena& arena, Buffers& b) {
  const int64_t n = p.tokens;
  b.facts = arena.take<BatchFacts>(1);
  b.tickets = arena.take<int>(2);
  if (c.runs_ahead()) {
    b.dx_read = arena.take<int>(Readers::counters(p.vocab_local));
    if (b.dx_read) b.dw_read = b.dx_read + 1;
  }
  b.token_target = arena.take<int>(n);
  if (!c.is_wide()) b.token_shift = arena.take<float>(n);
  b.rows.index = arena.take<int>(n);
  b.rows.target = arena.take<int>(n);
  if (p.has_token_scale) {
    b.token_scale = arena.take<float>(n);
    b.rows.scale = arena.take<float>(n);
  }
  b.rows.shift = arena.take<float>(n);
  b.rows.peak = arena.take<int>(n);
  b.rows.target_logit = arena.take<float>(n);
  b.rows.factor = arena.take<float>(n);
  b.rows.target_factor = arena.take<float>(n);
  b.row_class_weight = arena.take<float>(n);
  b.row_loss = arena.take<double>(n);
  if (p.wants_accuracy) b.hit = arena.take<int8_t>(n);
  if (p.has_bias) b.bias = arena.take<float>(p.vocab_local);
  if (p.has_class_weight) b.class_weight = arena.take<float>(p.vocab_local);
  if (p.wants_db) b.db = arena.take<double>(p.vocab_local);
  if (p.wants_db) b.db_factor = arena.take<float>(c.chunk_rows);
  if (c.sort_bytes > 0) b.sorted = arena.take<uint64_t>(n);
  if (c.sums_weight()) {
    b.row_class_sum = arena.take<float>(n);
    b.row_smooth = arena.take<float>(n);
    b.weight_sum = arena.take<float>(p.hidden);
    b.weight_parts = arena.take<float>(kSumParts * p.hidden);
    b.smooth_row = arena.take<float>(p.hidden);
  }
  b.bias_sum = arena.take<double>(2);
}

// What only the sort before the first chunk needs lies where the buffer of a chunk lies later.
inline void lay_out_buffer(const Problem& p, const Config& c, Arena& arena, Buffers& b) {
  const int64_t elements = c.chunk_rows * c.exp_stride;
  if (c.sort_bytes == 0) {
    b.exp = arena.take<uint16_t>(elements);
    return;
  }
  const int64_t keys = (p.tokens + 31) / 32 * 32;
  b.keys = arena.take<uint64_t>(std::max(keys + (c.sort_bytes + 7) / 8, (elements + 3) / 4));
  b.exp = reinterpret_cast<uint16_t*>(b.keys);
  if (b.keys) b.sort_scratch = reinterpret_cast<char*>(b.keys + keys);
}

// The passes over the buffer.
inline void lay_out_wide(const Problem& p, const Config& c, Arena& arena, Buffers& b) {
  b.logits = reinterpret_cast<float*>(b.exp);
  b.least_exponent = arena.take<int>(1);
  b.undo = arena.take<float>(1);
  b.target_slope = arena.take<float>(c.chunk_rows);
  b.sparse_logits = arena.take<float>(c.chunk_rows * p.soft_k);
}

inline void lay_out_tiles(const Problem& p, const Config& c, Arena& arena, Buffers& b) {
  const int64_t sums = c.tiles * c.state_rows;
  if (!c.sums_in_dx) b.tile_sums = arena.take<float>(sums);
  if (p.wants_entropy || p.has_upstream_entropy) b.tile_shifted = arena.take<float>(sums);
  if (p.options.label_smoothing > 0 && !c.sums_weight()) b.tile_classes = arena.take<float>(sums);
  if (c.kept > 0 || c.online) b.tile_peaks = arena.take<float>(sums);
}

// What the ranks exchange, and what the states are exchanged as.
inline void lay_out_ranks(const Problem& p, const Config& c, Arena& arena, Buffers& b) {
  if (c.kept > 0) {
    b.row_lse = arena.take<double>(c.chunk_rows);
    b.own_best = arena.take<Candidate<float>>(c.chunk_rows * c.kept);
    if (p.world > 1) b.all_best = arena.take<Candidate<float>>(c.chunk_rows * c.kept * p.world);
  }
  if (c.is_wide() || c.from_saved() || p.world > 1)
    b.own_states = arena.take<RowState<double>>(c.chunk_rows);
  if (p.world > 1) b.all_states = arena.take<RowState<double>>(c.chunk_rows * p.world);
}

inline Buffers lay_out(const Problem& p, const Config& c, Arena& arena) {
  const int64_t n = p.tokens, d = p.hidden;
  Buffers b;
  lay_out_tokens(p, c, arena, b);
  if (!c.x_in_dx) b.x = arena.take<uint16_t>((c.runs_ahead() ? 2 : 1) * c.chunk_rows * d);
  if (c.exp_stride > 0) lay_out_buffer(p, c, arena, b);
  if (c.is_wide())
    lay_out_wide(p, c, arena, b);
  else if (!c.from_saved())
    lay_out_tiles(p, c, arena, b);
  if (c.is_wide() || c.is_transformed() || c.by_slices())
    b.factors = arena.take<RowFactors>(c.chunk_rows);
  lay_out_ranks(p, c, arena, b);
  if (c.exchange_dx || (c.by_slices() && p.wants_dx))
    b.dx_part = arena.take<float>(c.chunk_rows * d);
  if (c.gather_tokens) {
    b.x_all = arena.take<uint16_t>(n * d);
    if (p.wants_dx) b.dx_all = arena.take<float>((n + n / p.world) * d);
  }
  if (c.dw == DwOutput::workspace) b.dw = arena.take<float>(p.vocab_local * d);
  if (c.dw == DwOutput::split && !p.wants_rest)
    b.rest = arena.take<char>(Rest::bytes(p.vocab_local, d, c.rest_bits));
  return b;
}

}  // namespace talea::lce::sm90
