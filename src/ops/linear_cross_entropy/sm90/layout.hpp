// The workspace of lane sm90, laid out once for counting and once for the pointers.
// Exists so that the stated bytes and the bytes used cannot differ.
// Never allocates.
#pragma once
#include "core/arena.hpp"
#include "ops/linear_cross_entropy/sm90/config.hpp"

namespace talea::lce::sm90 {

inline constexpr int kSumParts = 256;  // partial column sums of the weight, added in order

inline Buffers lay_out(const Problem& p, const Config& c, Arena& arena) {
  const int64_t n = p.tokens, d = p.hidden;
  Buffers b;
  b.facts = reinterpret_cast<BatchFacts*>(arena.take<double>(8));
  b.tickets = arena.take<int>(1);
  b.token_target = arena.take<int>(n);
  b.token_shift = arena.take<float>(n);
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
  if (p.wants_dw) {
    b.keys = arena.take<uint64_t>(n);
    b.sorted = arena.take<uint64_t>(n);
    b.sort_scratch = arena.take<char>(c.sort_bytes);
  }
  if (c.smoothing) {
    b.row_class_sum = arena.take<float>(n);
    b.row_smooth = arena.take<float>(n);
    b.weight_sum = arena.take<float>(d);
    b.weight_parts = arena.take<float>(kSumParts * d);
    b.smooth_row = arena.take<float>(d);
    b.bias_sum = arena.take<double>(2);
  }
  b.x = arena.take<uint16_t>(c.chunk_rows * d);
  if (c.exp_stride > 0) b.exp = arena.take<uint16_t>(c.chunk_rows * c.exp_stride);
  b.tile_sums = arena.take<float>(c.tiles * c.chunk_rows);
  if (p.wants_entropy) b.tile_shifted = arena.take<float>(c.tiles * c.chunk_rows);
  if (c.round_dw) b.dw = arena.take<float>(p.vocab_local * d);
  return b;
}

}  // namespace talea::lce::sm90
