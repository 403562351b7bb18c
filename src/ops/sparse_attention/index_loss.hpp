// What: the parts of the index loss that every host lane shares: N, one row's divergence, the end.
// Why: what counts as a row, and what a row without weight or keys gives, is decided once.
// Never: puts an epsilon under a logarithm or a normaliser.
#pragma once

#include <span>
#include <vector>

#include "ops/sparse_attention/contract.hpp"

namespace talea::sparse_attention {

inline double row_weight(const Args& a, int64_t b, int64_t s) {
  return a.row_weight ? a.row_weight.get(b, s) : 1;
}

struct LossScale {
  double rows = 0;    // N
  double factor = 0;  // coeff / N; 0 where no row counts
};
// Exchanges the count of rows where the scope is global.
LossScale loss_scale(const Call& c);

// The sum of the teacher over the ranks that cut heads.
void sum_teacher(const Call& c, std::span<double> teacher);

// weight * KL(teacher normalised || softmax(logits)), and weight * (p - t) into gradient.
double divergence(std::span<const double> logits, std::span<const double> teacher, double weight,
                  std::span<double> gradient);

// Writes the loss and what the result says of it.
void finish_loss(const Call& c, const LossScale& scale, double total);

}  // namespace talea::sparse_attention
