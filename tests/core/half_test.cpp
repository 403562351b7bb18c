// What: the library's 16-bit conversions against the tests' own, for every bit pattern.
// Why: the tests read and write tensors through their own code; both must mean the same.
// Never: samples: 2 x 65,536 patterns and their neighbourhoods are few.
#include "core/half.hpp"

#include <gtest/gtest.h>

#include <bit>

#include "support/array.hpp"

namespace talea {
namespace {

TEST(Half, EveryPatternDecodesTheSame) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint16_t cell[4] = {static_cast<uint16_t>(bits)};
      const double ours = load_element(cell, dtype, 0), theirs = testing::decode(dtype, cell, 0);
      const bool same = (std::isnan(ours) && std::isnan(theirs)) ||
                        std::bit_cast<uint64_t>(ours) == std::bit_cast<uint64_t>(theirs);
      ASSERT_TRUE(same) << name_of(dtype) << " " << bits;
    }
}

// Around each pattern: itself, the midpoint to the next one, and a hair to either side.
TEST(Half, RoundsOnceToNearestEven) {
  for (const DType dtype : {DType::bf16, DType::f16})
    for (uint32_t bits = 0; bits < 65535; ++bits) {
      const uint16_t pair[4] = {static_cast<uint16_t>(bits), static_cast<uint16_t>(bits + 1)};
      const double a = testing::decode(dtype, pair, 0), b = testing::decode(dtype, pair, 1);
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      const double middle = (a + b) / 2, hair = (b - a) * 1e-9;
      for (const double value : {a, middle - hair, middle, middle + hair}) {
        uint16_t ours[4] = {}, theirs[4] = {};
        store_element(ours, dtype, 0, value);
        testing::encode(dtype, theirs, 0, value);
        ASSERT_EQ(ours[0], theirs[0]) << name_of(dtype) << " " << value;
      }
    }
}

TEST(Half, OverflowsToInfinityAndKeepsNaN) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    uint16_t cell[4] = {};
    store_element(cell, dtype, 0, 1e39);
    EXPECT_EQ(testing::decode(dtype, cell, 0), INFINITY);
    store_element(cell, dtype, 0, -1e39);
    EXPECT_EQ(testing::decode(dtype, cell, 0), -INFINITY);
    store_element(cell, dtype, 0, NAN);
    EXPECT_TRUE(std::isnan(testing::decode(dtype, cell, 0)));
  }
}

}  // namespace
}  // namespace talea
