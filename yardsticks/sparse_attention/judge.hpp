// What: whether outputs are right: section 4 of the contract, "How right is right".
// Why: elementwise, against the truth and no worse than eager code; NaN never passes.
// Never: compares nothing and calls it right.
#pragma once

#include "yardsticks/sparse_attention/oracle.hpp"

namespace talea::yardsticks::sparse_attention {

// One tensor. width: bytes of an element as stored. extra: further absolute room, by element or
// one for all; empty: none.
struct Compared {
  const char* name;
  const std::vector<double>*ours, *truth, *yardstick;
  int64_t row = 1;                 // elements of a row, for the relative L2 of few rows
  DType dtype = DType::f32;        // of the problem: what its operands are rounded to
  double growth = 0;               // of e, from large logits
  double term = 0;                 // the largest summand, where sums cancel
  std::vector<double> extra = {};  // further room of each element
  const std::vector<double>* stored = nullptr;  // the truth, given o as the lane stored it
};
// Empty: right. Otherwise the worst element.
std::string compare(const Compared& t);

// What a lane wrote; absent outputs are empty.
struct Outcome {
  sa::Result forward, backward;
  std::vector<double> o, lse, row_max, o_residual, dq, dkv, d_sink;
  std::vector<int64_t> status;
  bool on_device = false;  // a lane of a device ran
  std::string damage;      // what was written that must not be, or changed under the call
};
// one_order: the lane sums dP and Delta alike, so that no cancellation is allowed for.
std::string judge(const Case& c, const Outcome& ours, bool one_order = false);

// Tensor cores add sixteen columns at a time to a sum in fp32 and cut it off towards zero each time
// (docs/decisions/0020-sparse-attention-choices.md): what a sum of so many columns may lose.
double room_of_cut_sums(int64_t columns, double largest);
// The largest share of that room that a row beyond the accuracy rule needed, over a run.
extern double used_of_cut_sums;

double relative_l2(const std::vector<double>& ours, const std::vector<double>& truth);

}  // namespace talea::yardsticks::sparse_attention
