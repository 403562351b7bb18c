// What: the truth of a case in fp64, and what eager code of the same dtypes gets.
// Why: the two yardsticks by which every lane is judged.
// Never: shares code with src: validity, softmax and gradients are written a second time.
#pragma once

#include "yardsticks/sparse_attention/case.hpp"

namespace talea::yardsticks::sparse_attention {

struct Numbers {
  std::vector<double> o, lse, row_max;  // [B, S, H, d_v], [B, S, H]
  std::vector<double> dq, dkv, d_sink;  // [B, S, H, D], [outer, inner, G, D], [H]
  std::vector<double> d_sink_squares;   // sum of squares of what d_sink adds up
  int64_t valid = 0, foreign = 0, first_foreign = -1;
  double largest_logit = 0;
  double dq_term = 0, dkv_term = 0;  // the largest summands, of which sums may cancel
};

// o, and its residual or nothing, as a lane's forward stored them: what its backward gets.
struct StoredO {
  const std::vector<double>&o, &residual;
};
// Dense over keys: each weighs as often as valid slots name it.
// stored: with Delta from that o, where backward gets it.
Numbers truth(const Case& c, const StoredO* stored = nullptr);
// Gathered, fp32 scores and softmax; P, dS, o, dq, dkv each rounded once to the input's dtype.
Numbers eager(const Case& c);

// Row of kv that slot k of (b, s, g) names: outer * inner extent + inner; -1: absent, -2: foreign.
int64_t named_row(const Case& c, int64_t b, int64_t s, int64_t g, int64_t k);
// Exact value of a column of a stored row.
double kv_value(const Case& c, int64_t row, int64_t g, int64_t column);
double q_value(const Case& c, int64_t b, int64_t s, int64_t h, int64_t column);

}  // namespace talea::yardsticks::sparse_attention
