// What: the rule of "how right is right": ours against the truth and the eager yardstick.
// Why: one elementwise rule for every lane, written so that NaN fails.
// Never: a relative tolerance a test could choose.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "yardsticks/linear_cross_entropy/oracle.hpp"

namespace talea::testing {

// Planted bugs of the comparison itself, switched on by the test program only.
enum class CompareMutant {
  off,
  nan_passes,
  tolerance_cannot_fail,
  only_losses,
  luck_of_one,
  wide_floor
};
inline CompareMutant compare_mutant = CompareMutant::off;

struct Yardsticks {
  Answer truth;
  std::vector<Answer> eager;  // legitimate summation orders
};
Yardsticks yardsticks(const Case& c);

// The share of the floor that may be used: what no run has needed is no licence (decision 0007).
inline constexpr Real floor_share = 0.75L;

// One tensor against the truth. Empty: it holds. Otherwise the worst element and both figures.
struct Rule {
  Real e = 1e-6L;            // of the tensor's largest magnitude
  Real floor_magnitude = 0;  // the magnitude counts as at least this
  // What no arithmetic of this precision can avoid, per element, in units of its rounding
  // (docs/decisions/0007-what-cancellation-leaves.md).
  const std::vector<Real>* floor = nullptr;
  const std::vector<Real>* walk =
      nullptr;  // the same in place of e and the floor, where it is more
  Real unit = 0x1p-24L;
  // 16-bit gradients: these multiples of the worst eager error and of eager's L2. 0: elementwise.
  int worst_times = 0, l2_times = 0;
  Real luck = 0;  // what the square of the L2 error may have by luck beside the last rounding's
  // What rounding each of its terms once may bring to element k; asked where all else refuses it.
  std::function<Real(int64_t)> terms;
  Real* worst_use = nullptr;  // the largest share of the floor that was needed, over a run
};
// What a run needed beyond the contract's accuracy rule, for the products and for the lane that is
// eager on purpose: the largest share of the floor, of the roundings of two logits that trade
// places, and of those of one logit.
struct Used {
  Real floor = 0, tie = 0, logit = 0;
};
inline Used used_by_products, used_by_yardstick;
std::string compare(const std::string& name, const Array& ours, const std::vector<Real>& truth,
                    const std::vector<const std::vector<Real>*>& eager, const Rule& rule);

// Half the distance of two neighbours of a 16-bit dtype at x: the most one rounding can be off.
Real half_step(DType dtype, Real x);

// A product must be as near to the truth as eager arithmetic. A yardstick is eager arithmetic in
// code of its own: within what rounding its logits and their gradient to 16 bits explains.
// one_term: a product that rounds the gradient of each logit to the inputs' 16 bits before it
// multiplies, as eager arithmetic does, and as device lanes do with large weights or by force.
// small_terms: one that does so with what is no more than a 64th of its row, and keeps two terms of
// the rest.
enum class Standing { product, one_term, small_terms, yardstick };

// Every output the case wants, the exact zeros, and the ranking. Empty: all holds.
std::string judge(const Case& c, const CaseOutputs& ours, const Yardsticks& y,
                  Standing standing = Standing::product);

// Same dtype, shape and bits of every element.
std::string same_bits(const std::string& name, const Array& a, const Array& b);
std::string same_bits(const CaseOutputs& a, const CaseOutputs& b);

Real relative_l2(const Array& ours, const std::vector<Real>& truth);

}  // namespace talea::testing
