// What: index scores of one query against panels of keys, and the choice of the largest of them.
// Why: products, activation, weights and the sum over heads stay in registers.
// Never: sums heads in another order than ascending, or lets a crowded score value overflow.
#pragma once

#include <cstdint>

namespace talea::sparse_attention::cpu {

// score[j] = key_scale[j] * sum_h weight[h] * act(q[h] . key j), for whole panels of keys.
struct ScorePanels {
  const float* q = nullptr;  // [heads, depth]
  const float* weights = nullptr;
  const float* keys = nullptr;  // panels: element (k, lane) of panel n at n * depth * lanes + ...
  const float* key_scale = nullptr;  // null: 1
  float* scores = nullptr;           // [panels * lanes]
  int64_t heads = 0, depth = 0, panels = 0;
  bool relu = true;
};
void score_panels(const ScorePanels& t);

// The min(k, those beyond -Inf) largest of scores[0, n) by the rule of section 1, ascending by
// place, each plus `first`. bits: room for n numbers. Returns how many; counts NaN.
int64_t select_largest(const float* scores, int64_t n, int64_t k, int64_t first, uint32_t* bits,
                       int32_t* to, int64_t& nan_scores);

}  // namespace talea::sparse_attention::cpu
