// What: the passes over a tile of scores [keys, heads] whose lanes are the heads.
// Why: maxima, exponentials and gradients need no sum across a vector.
// Never: rounds a score, or lets one head touch another.
#pragma once

#include <cstdint>

namespace talea::sparse_attention::cpu {

// padded: heads in whole vectors; every array has as many numbers a row.
struct ScoreTile {
  float* s = nullptr;
  int64_t keys = 0, padded = 0;
  float scale = 1;
};

// Scales the products, raises max, replaces scores by exp(s - max) and adds them to sum. factor:
// what older sums are multiplied by. max is NaN from the first NaN on. Returns whether any factor
// is not 1.
bool softmax_tile(const ScoreTile& t, float* max, float* sum, float* factor);

// dS and P of backward: s holds products and becomes P = exp(s - whole) * share; d holds d_o . v
// and becomes scale * dS. d_lse: null, or the upstream of lse, beside lse and its share.
struct GradientTile {
  ScoreTile scores;
  float* d = nullptr;
  const float *whole = nullptr, *share = nullptr, *delta = nullptr;
  const float *lse = nullptr, *lse_share = nullptr, *d_lse = nullptr;
};
void gradient_tile(const GradientTile& t);

// Sum of x * y in fp64.
double dot(const float* x, const float* y, int64_t n);
void scale_row(float* x, int64_t n, float factor);

}  // namespace talea::sparse_attention::cpu
