// What: the rule of "how right is right": ours against the truth and the eager yardstick.
// Why: one elementwise rule for every lane, written so that NaN fails.
// Never: a relative tolerance a test could choose.
#pragma once

#include <string>
#include <vector>

#include "support/oracle.hpp"

namespace talea::testing {

// Planted bugs of the comparison itself, switched on by the test program only.
enum class CompareMutant { off, nan_passes, tolerance_cannot_fail, only_losses, luck_of_one };
inline CompareMutant compare_mutant = CompareMutant::off;

struct Yardsticks {
  Answer truth;
  std::vector<Answer> eager;  // legitimate summation orders
};
Yardsticks yardsticks(const Case& c);

// One tensor against the truth. Empty: it holds. Otherwise the worst element and both figures.
struct Rule {
  Real e = 1e-6L;            // of the tensor's largest magnitude
  Real floor_magnitude = 0;  // the magnitude counts as at least this
  // What the working precision leaves of a sum whose terms cancel: added to every bound.
  Real noise = 0;
  // 16-bit gradients: this multiple of the worst eager error, and relative L2. 0: elementwise.
  int worst_times = 0;
  bool l2 = false;
};
std::string compare(const std::string& name, const Array& ours, const std::vector<Real>& truth,
                    const std::vector<const std::vector<Real>*>& eager, const Rule& rule);

// A product must be as near to the truth as eager arithmetic. A yardstick is eager arithmetic in
// code of its own: within what rounding its logits and their gradient to 16 bits explains.
enum class Standing { product, yardstick };

// Every output the case wants, the exact zeros, and the ranking. Empty: all holds.
std::string judge(const Case& c, const CaseOutputs& ours, const Yardsticks& y,
                  Standing standing = Standing::product);

// Same dtype, shape and bits of every element.
std::string same_bits(const std::string& name, const Array& a, const Array& b);
std::string same_bits(const CaseOutputs& a, const CaseOutputs& b);

Real relative_l2(const Array& ours, const std::vector<Real>& truth);

}  // namespace talea::testing
