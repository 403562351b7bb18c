// What: what the drawn cases promise beyond their description.
// Why: a suite that forces the way of large weights and draws small ones would judge another way.
// Never: runs a lane.
#include "yardsticks/linear_cross_entropy/generate.hpp"

#include <gtest/gtest.h>

namespace talea::testing {
namespace {

int64_t weight_elements(const Case& c) { return c.vocab() * c.hidden(); }

TEST(Generate, SizesAreTheDescriptions) {
  const Case c = make_case({.tokens = 7, .hidden = 5, .vocab = 11});
  EXPECT_EQ(c.tokens(), 7);
  EXPECT_EQ(c.hidden(), 5);
  EXPECT_EQ(c.vocab(), 11);
}

TEST(Generate, WeightsHaveTheLeastElementsAskedFor) {
  struct Restore {
    int64_t before = least_weight;
    ~Restore() { least_weight = before; }
  } restore;
  least_weight = (int64_t{1} << 17) + 1;
  for (const int hidden : {1, 5, 129})
    for (const int vocab : {1, 11, 1021}) {
      const Case c = make_case({.tokens = 7, .hidden = hidden, .vocab = vocab});
      EXPECT_GE(weight_elements(c), least_weight) << hidden << " x " << vocab;
      EXPECT_EQ(c.tokens(), 7);
    }
  // A weight that is large enough, or empty, stays as described.
  EXPECT_EQ(weight_elements(make_case({.hidden = 512, .vocab = 257})), 512 * 257);
  EXPECT_EQ(weight_elements(make_case({.hidden = 0, .vocab = 11})), 0);
}

}  // namespace
}  // namespace talea::testing
