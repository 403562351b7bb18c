// What: the passes of the index loss over a tile of products [keys, heads] whose lanes are heads.
// Why: teacher, index scores and their gradients take one sweep each.
// Never: lets a lane beyond the heads take part.
#pragma once

#include <cstdint>

namespace talea::sparse_attention::cpu {

// heads of them count; a row has `padded` numbers.
struct LossTile {
  float* s = nullptr;
  int64_t keys = 0, heads = 0, padded = 0;
};

// to[j] = sum_h exp(scale * s_jh - lse_h).
void teacher_tile(const LossTile& t, float scale, const float* lse, double* to);

// to[j] = sum_h weight_h * act(s_jh).
void score_tile(const LossTile& t, const float* weights, bool relu, double* to);

// From gradients g[j] of the scores: weights' gradients are added to dw, s becomes that of itself.
void chain_tile(const LossTile& t, const double* g, const float* weights, bool relu, float* dw);

}  // namespace talea::sparse_attention::cpu
