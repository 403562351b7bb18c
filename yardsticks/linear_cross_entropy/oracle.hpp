// What: the contract's formulas in long double, written down naively, as the truth of every test.
// Why: an oracle that shares code with the library would share its mistakes.
// Never: includes anything of src/.
#pragma once

#include <vector>

#include "yardsticks/linear_cross_entropy/case.hpp"

namespace talea::testing {

using Real = long double;

enum class Row { valid, ignored, poisoned };

// Values of all outputs, computed whether or not the case wants them; row-major.
struct Answer {
  std::vector<Row> rows;
  std::vector<Real> logits;  // [tokens, vocab]; rows that are not valid hold NaN
  Real largest_logit = 0;    // finite magnitude
  std::vector<Real> loss;    // one, or tokens with Reduction::none
  std::vector<Real> lse, target_logprob, entropy;
  std::vector<int64_t> argmax;
  Real accuracy = 0;
  std::vector<Real> dz;          // [tokens, vocab]: gradient of the logits
  std::vector<Real> dx, dw, db;  // dw, db include what they are added to, and padded rows
  Real denominator = 1;
  // Per element of a gradient, in roundings: what one rounding of each logit, one of each term and
  // the sum of the terms can leave (docs/decisions/0007-what-cancellation-leaves.md).
  std::vector<Real> dx_floor, dw_floor, db_floor;
  // What p - 1 by subtraction adds to that; nothing that a product may claim.
  std::vector<Real> dx_subtracted, dw_subtracted, db_subtracted;
  // Of fp32 problems (else empty), in roundings: five deviations of lse by those of the logits; and
  // per element of a gradient five deviations of its terms, beside the other two.
  std::vector<Real> lse_walk, dx_walk, dw_walk, db_walk;
  // [tokens, vocab]: the magnitude of each logit's gradient, times the scale, as a product forms
  // it.
  std::vector<Real> sizes;
  std::vector<Real> factors;  // the same as it is multiplied: terms summed, softcap's slope in it
  bool rows_alike = false;    // of the weight: all are the same numbers
  std::vector<Real> row_largest;  // the largest number each row's logits pass through
};

Answer oracle(const Case& c);

// The deviation of a logit, in roundings, of a row of hidden and one of the weight (decision 0007).
Real logit_walk(const Case& c, int64_t t, int64_t v, const Real* x, const Real* w);

// The kinds of the rows, from the targets alone.
std::vector<Row> classify(const Case& c);
// M and whether nothing was counted.
struct Mean {
  Real denominator = 1;
  bool empty = false;
};
Mean mean_of(const Case& c, const std::vector<Row>& rows);
// q of one row, with repeated sparse ids added up.
std::vector<Real> distribution(const Case& c, int64_t t);

}  // namespace talea::testing
